"""Tests of dims of an operator's inputs: whether they can be split together, and what becomes of its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .trial_call import TrialCall, nearly_equal, normal_like

InputDims = tuple[int | None, ...]  # of each input the dim that is split; None: the input stays whole
OutputDims = tuple[int | None, ...]  # of each output the dim that is split; None: the parts add up to it
Cut = tuple[Tensor, Tensor]  # of a dim: the indices of either part


@dataclass(frozen=True)
class SplitFactor:
    """Dims that are split together.

    Attributes:
        inputs: the dim of each input.
        outputs: the dim of each output.
        additive: inputs that stay whole, and of which each part takes a term.
        contiguous: whether each part must be a range of indices.
    """

    inputs: InputDims
    outputs: OutputDims
    additive: frozenset[int] = frozenset()
    contiguous: bool = False

    @property
    def is_sum(self) -> bool:
        """Return whether parts of an output add up."""
        return None in self.outputs


def factor_of(calls: Sequence[TrialCall], inputs: InputDims) -> SplitFactor | None:
    """Return what becomes of results where ``inputs`` are split; None where parts do not make up the whole."""
    for additive in _additive_groups(calls[0], inputs):
        outputs = _output_dims(calls, inputs, additive, _ranges)
        if outputs is not None:
            contiguous = _output_dims(calls, inputs, additive, _strided) != outputs
            return SplitFactor(inputs, outputs, additive, contiguous)
    return None


def can_split_both(calls: Sequence[TrialCall], first: SplitFactor, second: SplitFactor) -> bool:
    """Return whether each half of ``first`` can be split by ``second`` as the whole can."""
    halves = [
        half
        for call in calls
        for half in _parts(call, first.inputs, first.additive, _ranges(_size(call, first.inputs))[0])
    ]
    return _output_dims(halves, second.inputs, second.additive, _ranges) == second.outputs


def linear_groups(calls: Sequence[TrialCall]) -> list[tuple[int, ...]]:
    """Return the groups of float inputs, each input alone and all of them, in which the operator is linear."""
    floats = [i for i, x in enumerate(calls[0].input_tensors) if x.is_floating_point()]
    groups = [(i,) for i in floats] + ([tuple(floats)] if len(floats) > 1 else [])
    return [group for group in groups if all(_is_linear(call, group) for call in calls)]


def _additive_groups(call: TrialCall, inputs: InputDims) -> Iterator[frozenset[int]]:
    """Yield groups of whole float inputs of which each part may take a term: none, each alone, all."""
    yield frozenset()
    whole = [i for i, x in enumerate(call.input_tensors) if inputs[i] is None and x.is_floating_point()]
    yield from (frozenset([i]) for i in whole)
    if len(whole) > 1:
        yield frozenset(whole)


def _size(call: TrialCall, inputs: InputDims) -> int:
    return next(x.shape[dim] for x, dim in zip(call.input_tensors, inputs, strict=True) if dim is not None)


def _ranges(size: int) -> list[Cut]:
    """Return two halves; and the first index alone, with the rest."""
    index = torch.arange(size)
    return [(index[:cut], index[cut:]) for cut in dict.fromkeys((size // 2, 1))]


def _strided(size: int) -> list[Cut]:
    """Return the even indices and the odd ones."""
    index = torch.arange(size)
    return [(index[::2], index[1::2])]


def _parts(call: TrialCall, inputs: InputDims, additive: frozenset[int], cut: Cut) -> list[TrialCall]:
    """Return the calls of both parts."""
    terms = {i: _two_terms(call.input_tensors[i]) for i in additive}
    calls = []
    for part, index in enumerate(cut):
        tensors = []
        for i, (x, dim) in enumerate(zip(call.input_tensors, inputs, strict=True)):
            if dim is not None:
                tensors.append(x.index_select(dim, index.to(x.device)))
            else:
                tensors.append(terms[i][part] if i in additive else x)
        calls.append(call.with_tensors(tensors))
    return calls


def _two_terms(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return two tensors of unlike numbers and signs that add up to ``x``, as partial sums of ranks may be."""
    term = normal_like(x, torch.Generator().manual_seed(x.numel()))
    return term, x - term


def _output_dims(
    calls: Sequence[TrialCall], inputs: InputDims, additive: frozenset[int], cuts: Callable[[int], list[Cut]]
) -> OutputDims | None:
    """Return the dim of each output in which parts stand, in all calls and cuts; None where there is none."""
    possible: list[set[int | None]] | None = None
    for call in calls:
        whole = call.output_tensors()
        for cut in cuts(_size(call, inputs)):
            try:
                parts = [part.output_tensors() for part in _parts(call, inputs, additive, cut)]
            except Exception:  # of whatever kind: the operator does not run on parts
                return None
            dims = [_places(x, first, second, cut) for x, first, second in zip(whole, *parts, strict=True)]
            possible = dims if possible is None else [a & b for a, b in zip(possible, dims, strict=True)]
            if not all(possible):
                return None
    if possible is None:
        return None
    if additive and not all(None in dims for dims in possible):
        return None  # terms of an input belong to sums
    return tuple(max(dims, key=_is_split) for dims in possible)


def _is_split(dim: int | None) -> bool:
    return dim is not None


def _places(whole: Tensor, first: Tensor, second: Tensor, cut: Cut) -> set[int | None]:
    """Return the dims of ``whole`` in which the parts stand; None among them where they add up to it."""
    size = sum(len(index) for index in cut)
    places: set[int | None] = {
        dim
        for dim, length in enumerate(whole.shape)
        if length == size
        and all(_stands(whole, part, dim, index) for part, index in zip((first, second), cut, strict=True))
    }
    if whole.is_floating_point() and first.shape == second.shape and nearly_equal(whole, first + second):
        places.add(None)
    return places


def _stands(whole: Tensor, part: Tensor, dim: int, index: Tensor) -> bool:
    return nearly_equal(whole.index_select(dim, index.to(whole.device)), part)


def _is_linear(call: TrialCall, group: tuple[int, ...]) -> bool:
    """Return whether the operator of a sum of two terms of ``group`` is the sum of what it makes of each."""
    generator = torch.Generator().manual_seed(0)
    inputs = call.input_tensors
    other_inputs = [normal_like(x, generator) if i in group else x for i, x in enumerate(inputs)]
    pairs = enumerate(zip(inputs, other_inputs, strict=True))
    mixed_inputs = [2 * x - 3 * y if i in group else x for i, (x, y) in pairs]
    other, mixed = call.with_tensors(other_inputs), call.with_tensors(mixed_inputs)
    if not (other.has_numbers() and mixed.has_numbers()):
        return False  # other numbers are outside of its domain
    results = zip(call.output_tensors(), other.output_tensors(), mixed.output_tensors(), strict=True)
    return all(z.is_floating_point() and nearly_equal(z, 2 * x - 3 * y) for x, y, z in results)
