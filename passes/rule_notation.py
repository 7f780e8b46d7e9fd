"""Sharding rules in factor notation: ``"m k, k n -> m n"``.

A rule names the *factors* of an operator's dims. Everything follows from where a factor stands: an input that has
it is sharded, an input that lacks it is replicated, an output that lacks it is a partial sum. ``...`` stands for
leading dims that broadcast. The algorithm never looks at operator types. (After einops' notation and Shardy's
factors.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ..annotations import shape, tensor_inputs, values

Dims = tuple[tuple[str, ...], ...]  # for each dim its factors, outermost first; () for a broadcast dim of size 1


@dataclass(frozen=True)
class Factors:
    """What a rule says of one node.

    ``sizes``: the size of each factor. ``whole``: factors that must not be split. ``linear``: groups of inputs in
    which the operator is linear, the others held fixed. ``additive``: inputs that are added to a contraction (a
    bias): they enter a partial sum as partial. ``contiguous``: factors that may be split only from the outside
    (a rank must hold a run of indices). ``mean``: a missing factor is averaged, not summed.
    """

    inputs: tuple[Dims, ...]
    outputs: tuple[Dims, ...]
    sizes: Mapping[str, int]
    whole: frozenset[str] = frozenset()
    linear: tuple[tuple[int, ...], ...] = ()
    additive: frozenset[int] = frozenset()
    contiguous: frozenset[str] = frozenset()
    mean: bool = False

    def __post_init__(self) -> None:
        for dims in (*self.inputs, *self.outputs):
            for dim in dims:
                for factor in dim:
                    assert factor in self.sizes, f"factor {factor} has no size"

    @property
    def names(self) -> tuple[str, ...]:
        """Every factor once, outputs first."""
        found = (f for dims in (*self.outputs, *self.inputs) for dim in dims for f in dim)
        return tuple(dict.fromkeys(found))

    def offset(self, dims: Dims, factor: str) -> tuple[int, int] | None:
        """(dim, product of the factors outside it in that dim) of ``factor``; None where ``dims`` lacks it."""
        for position, dim in enumerate(dims):
            if factor in dim:
                return position, math.prod(self.sizes[f] for f in dim[: dim.index(factor)])
        return None


SpecFn = Callable[[fx.Node], Factors]


@dataclass(frozen=True)
class Rule:
    """How ``target`` may be sharded. ``shape_arg``: the position of an argument that is the output's shape, which
    becomes the local shape on each rank."""

    target: Any
    factors: SpecFn
    shape_arg: int | None = None
    text: str = field(default="", compare=False)


def rule(
    target: Any,
    text: str,
    *,
    whole: str = "",
    linear: Sequence[Sequence[int]] = (),
    additive: Sequence[int] = (),
    contiguous: str = "",
    shape_arg: int | None = None,
) -> Rule:
    """A rule in notation.

    >>> rule("mm", "m k, k n -> m n", linear=[[0], [1]]).text
    'm k, k n -> m n'

    Raises:
        ValueError: if the text is malformed, or an option names a factor that the text lacks.
    """
    inputs, outputs = _parse(text)
    named = {token for side in (*inputs, *outputs) for token in side}
    for option in (whole, contiguous):
        for factor in option.split():
            if factor not in named:
                raise ValueError(f"rule {text!r}: {factor!r} is not a factor of it")

    def factors(node: fx.Node) -> Factors:
        given = [shape(n) for n in tensor_inputs(node)]
        made = [tuple(v.shape) for v in values(node)]
        return _instantiate(text, inputs[: len(given)], outputs, given, made, whole, linear, additive, contiguous)

    return Rule(target, factors, shape_arg, text)


def _parse(text: str) -> tuple[list[list[str]], list[list[str]]]:
    sides = text.split("->")
    if len(sides) != 2:
        raise ValueError(f"rule {text!r}: write inputs -> outputs, with one '->'")
    parsed = [[part.split() for part in side.split(",")] for side in sides]
    for tensor in (*parsed[0], *parsed[1]):
        if "..." in tensor[1:]:
            raise ValueError(f"rule {text!r}: '...' may only come first")
        for token in tensor:
            if token != "..." and not token.isidentifier():
                raise ValueError(f"rule {text!r}: {token!r} is not a name")
        if len(set(tensor)) != len(tensor):
            raise ValueError(f"rule {text!r}: a factor stands twice in one tensor")
    return parsed[0], parsed[1]


def _instantiate(
    text: str,
    inputs: list[list[str]],
    outputs: list[list[str]],
    given: list[tuple[int, ...]],
    made: list[tuple[int, ...]],
    whole: str,
    linear: Sequence[Sequence[int]],
    additive: Sequence[int],
    contiguous: str,
) -> Factors:
    if len(inputs) != len(given) or len(outputs) != len(made):
        raise ValueError(f"rule {text!r} does not fit {len(given)} inputs and {len(made)} outputs")
    expanded = []
    for tokens, dims in zip((*inputs, *outputs), (*given, *made), strict=True):
        leading = len(dims) - len(tokens) + 1
        if tokens[:1] == ["..."]:
            names = [f"b{leading - 1 - i}" for i in range(leading)] + tokens[1:]
        else:
            names = list(tokens)
        if len(names) != len(dims):
            raise ValueError(f"rule {text!r} does not fit a tensor of shape {tuple(dims)}")
        expanded.append((names, dims))
    sizes: dict[str, int] = {}
    for names, dims in expanded:
        for name, size in zip(names, dims, strict=True):
            if sizes.get(name, 1) != 1 and size not in (1, sizes[name]):
                raise ValueError(f"rule {text!r}: factor {name} is both {sizes[name]} and {size}")
            sizes[name] = max(size, sizes.get(name, 1))
    specs = [
        tuple((name,) if size == sizes[name] else () for name, size in zip(names, dims, strict=True))
        for names, dims in expanded
    ]
    return Factors(
        tuple(specs[: len(given)]),
        tuple(specs[len(given) :]),
        sizes,
        frozenset(whole.split()),
        tuple(tuple(group) for group in linear if all(i < len(given) for i in group)),
        frozenset(i for i in additive if i < len(given)),
        frozenset(contiguous.split()),
    )


def table(*rules: Rule | Iterable[Rule]) -> dict[Any, Rule]:
    """Rules by operator."""
    found: dict[Any, Rule] = {}
    for entry in rules:
        for one in [entry] if isinstance(entry, Rule) else entry:
            found[one.target] = one
    return found
