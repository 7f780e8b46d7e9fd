"""The public function: a sharding rule for an operator, from calls on sample inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import islice, product
from string import ascii_lowercase
from typing import Any

import torch
from torch import Generator

from ....compat.torch import OpOverload, schema
from ..notation import Rule, rule
from ..targets import operator_of
from .split_factor import InputDims, SplitFactor, can_split_both, factor_of, linear_groups
from .trial_call import TrialCall, nearly_equal

NUM_SHUFFLES = 2  # calls with the same numbers in another order, beside each sample
MAX_CANDIDATES = 10_000  # combinations of dims that are tried


def find_rule(op: Any, *samples: Sequence[Any]) -> Rule:
    """Return the sharding rule of an operator, found by splitting each dim of sample inputs.

    The operator runs on whole inputs and on parts of them. Dims are a factor of the rule if the parts of each result
    stand in a dim of the whole result, or add up to it: in every sample, in two halves, and with the first index apart.
    Elements of float inputs are also shuffled, and drawn anew where the operator takes them. All other dims are
    ``whole``. What samples do not show cannot be found:
    give at least two with other sizes, in which dims that have nothing to do with each other are of different sizes.
    Dims of several factors, ``(h d)``, are not searched for. Print the rule, read it, and write it down.

    Args:
        op: the operator, as :func:`.rule` takes it; of one that writes to its arguments, its functional form runs.
        samples: for each sample the tuple of its positional arguments; a dict at the end of a tuple has those by
            keyword. Dims of size 1 are not split; 4 and more serve best. Numbers in float64 are compared to 1e-9, those
            of operators without float64 to what their dtype holds.

    Raises:
        ValueError: if there is no sample, or samples have other numbers of tensors or dims; if the operator is one of
            PyTorch's that writes to its arguments; if it returns NaN, or draws random numbers; if too many dims are
            equally large.

    >>> print(find_rule("aten::mm.default", (torch.randn(4, 6), torch.randn(6, 8))))
    quintnet.rule("aten::mm.default", "a b, b c -> a c", linear=[[0], [1]])
    """
    operator = operator_of(op)
    if not isinstance(operator, OpOverload):
        raise ValueError(f"{op!r} is no operator: write torch.ops.lib.op.default, or 'lib::op'")
    calls = _calls(operator, samples)
    factors = _factors(calls)
    return _rule(operator, calls, factors)


def _calls(operator: OpOverload, samples: Sequence[Sequence[Any]]) -> list[TrialCall]:
    """Return the calls of all samples, and those with shuffled numbers."""
    if schema(operator).is_mutable:
        raise ValueError(f"{operator} writes to its arguments: a rule is for an operator that returns what it computes")
    if not samples:
        raise ValueError(f"a rule of {operator} needs a sample: the tuple of the arguments of a call")
    generator = torch.Generator().manual_seed(0)
    calls = [TrialCall.from_arguments(operator, arguments).in_float64() for arguments in samples]
    ranks = {(*(x.dim() for x in call.input_tensors), *(x.dim() for x in call.output_tensors())) for call in calls}
    if len(ranks) != 1 or not calls[0].input_tensors:
        raise ValueError(f"samples of {operator} need the same number of tensors, at least one, and of dims of each")
    for call in calls:
        _require_comparable(call)
    return [other for call in calls for other in (call, *_other_numbers(call, generator))]


def _require_comparable(call: TrialCall) -> None:
    if not call.has_numbers():
        raise ValueError(f"{call.operator} returns NaN for a sample, which nothing can be compared with")
    if not all(nearly_equal(x, y) for x, y in zip(call.output_tensors(), call.output_tensors(), strict=True)):
        raise ValueError(f"{call.operator} returns other numbers when it is called again: nothing can be compared")


def _other_numbers(call: TrialCall, generator: Generator) -> Iterator[TrialCall]:
    """Yield calls with the numbers in another order, and with normal numbers: a sample may be all ones."""
    drawn = [*(call.shuffled(generator) for _ in range(NUM_SHUFFLES)), call.normal(generator)]
    yield from (other for other in drawn if other.has_numbers())


def _factors(calls: Sequence[TrialCall]) -> list[SplitFactor]:
    """Return the factors: the smallest sets of dims that can be split, each dim in one, all of which go together."""
    factors: list[SplitFactor] = []
    for inputs in _candidates(calls):
        taken = any(a is not None and a == b for factor in factors for a, b in zip(factor.inputs, inputs, strict=True))
        if taken:
            continue
        factor = factor_of(calls, inputs)
        if factor is not None and all(_fit_together(calls, factor, other) for other in factors):
            factors.append(factor)
    return factors


def _fit_together(calls: Sequence[TrialCall], first: SplitFactor, second: SplitFactor) -> bool:
    if any(a is not None and a == b for a, b in zip(first.outputs, second.outputs, strict=True)):
        return False
    additive = first.additive | second.additive
    if not all(_takes_terms_of(factor, additive) for factor in (first, second)):
        return False
    return can_split_both(calls, first, second) and can_split_both(calls, second, first)


def _takes_terms_of(factor: SplitFactor, additive: Set[int]) -> bool:
    """Return whether a sum takes terms of all inputs that a rule calls additive, but for those that it splits."""
    return not factor.is_sum or factor.additive == {i for i in additive if factor.inputs[i] is None}


def _candidates(calls: Sequence[TrialCall]) -> Iterator[InputDims]:
    """Yield sets of dims that have one size in each call, at most one of an input, small sets first.

    Raises:
        ValueError: if there are too many.
    """
    shapes = [[tuple(x.shape) for x in call.input_tensors] for call in calls]
    by_sizes: dict[tuple[int, ...], list[list[int | None]]] = {}
    for i, dims in enumerate(shapes[0]):
        for dim in range(len(dims)):
            sizes = tuple(call_shapes[i][dim] for call_shapes in shapes)
            if min(sizes) > 1:
                by_sizes.setdefault(sizes, [[None] for _ in shapes[0]])[i].append(dim)
    sets = (dims for choices in by_sizes.values() for dims in product(*choices) if any(d is not None for d in dims))
    candidates = list(islice(sets, MAX_CANDIDATES + 1))
    if len(candidates) > MAX_CANDIDATES:
        raise ValueError("too many dims are equally large: give samples in which unlike dims have unlike sizes")
    yield from sorted(candidates, key=lambda dims: sum(d is not None for d in dims))


def _rule(operator: OpOverload, calls: Sequence[TrialCall], factors: Sequence[SplitFactor]) -> Rule:
    inputs = [["" for _ in x.shape] for x in calls[0].input_tensors]
    outputs = [["" for _ in x.shape] for x in calls[0].output_tensors()]
    in_order = sorted(factors, key=lambda factor: [(d is None, d or 0) for d in factor.inputs])
    names = dict(zip(ascii_lowercase, in_order, strict=False))
    for name, factor in names.items():
        _name_dims(inputs, factor.inputs, name)
        _name_dims(outputs, factor.outputs, name)
    whole = _named_whole([*inputs, *outputs])
    text = f"{', '.join(map(' '.join, inputs))} -> {', '.join(map(' '.join, outputs))}"
    options: Mapping[str, Any] = {
        "whole": " ".join(whole),
        "linear": [list(group) for group in linear_groups(calls)],
        "additive": sorted({i for factor in factors for i in factor.additive}),
        "contiguous": " ".join(name for name, factor in names.items() if factor.contiguous),
    }
    return rule(operator, text, **options)


def _name_dims(tensors: Sequence[list[str]], dims: Sequence[int | None], name: str) -> None:
    """Name one dim of each tensor, but for those that lack the factor."""
    for tensor, dim in zip(tensors, dims, strict=True):
        if dim is not None:
            tensor[dim] = name


def _named_whole(tensors: Sequence[list[str]]) -> list[str]:
    """Name the dims that have no name yet; return the names."""
    names = []
    for number, dims in enumerate(tensors):
        for dim, name in enumerate(dims):
            if not name:
                dims[dim] = f"t{number}d{dim}"
                names.append(dims[dim])
    return names
