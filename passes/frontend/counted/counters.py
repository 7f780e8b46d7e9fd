"""Tensors whose elements are their own indices: ``torch.arange(n)``, in any shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from ....core.annotations import Leaf, shape, tensor_inputs, value
from ....ir.program import Captured
from ....ops.rules.node_factors import argument

aten = torch.ops.aten
_LIFTED_PREFIX = "lifted_tensor_"  # torch.export's names of tensors that are made while it traces


@dataclass(frozen=True)
class CounterPart:
    """A factor of a dim: the place along ``axis``, divided by ``inside``, modulo ``size``."""

    axis: int
    inside: int
    size: int


Counter = tuple[CounterPart, ...]  # the digits of a number, the first one the most significant


@dataclass(frozen=True)
class _Counting:
    """The factors of each dim of a tensor, by their sizes and whether they are digits of its numbers."""

    dims: tuple[tuple[tuple[int, bool], ...], ...]


def counter(index: fx.Node, rank: int) -> Counter | None:
    """Return how the elements of ``index`` follow from their places, or None if they do not.

    ``rank``: the number of dims that it broadcasts to.
    """
    counting = _counting(index)
    if counting is None:
        return None
    parts: list[CounterPart] = []
    for dim, factors in enumerate(counting.dims):
        for at, (size, digit) in enumerate(factors):
            if digit:
                inside = prod(size for size, _ in factors[at + 1 :])
                parts.append(CounterPart(rank - len(counting.dims) + dim, inside, size))
    return tuple(parts) or None


def is_counter(captured: Captured, leaf: Leaf) -> bool:
    """Return whether a tensor that forward makes of Python numbers is ``range(n)``, as in ``x[range(n), y]``."""
    tensor = captured.tensors.get(leaf.name) if leaf.kind == "constant" else None
    if tensor is None or not leaf.name.startswith(_LIFTED_PREFIX):
        return False
    if tensor.dtype is not torch.int64 or tensor.dim() != 1 or tensor.device.type == "meta":
        return False
    return torch.equal(tensor.cpu(), torch.arange(len(tensor)))


def _counting(node: fx.Node) -> _Counting | None:
    follow = _FOLLOWED.get(node.target)
    if follow is None:
        return _arange(node) if node.target in _ARANGES else None
    source = _counting(tensor_inputs(node)[0]) if value(node).dtype in (torch.int64, torch.int32) else None
    return None if source is None else follow(source, node)


def _arange(node: fx.Node) -> _Counting | None:
    start, step = argument(node, "start"), argument(node, "step")
    if start not in (None, 0) or step not in (None, 1) or value(node).is_floating_point():
        return None
    (size,) = shape(node)
    return _Counting((((size, True),) if size != 1 else (),))


def _regrouped(source: _Counting, node: fx.Node) -> _Counting | None:
    """Return the factors regrouped to other dims; a factor that lies in two of them is split."""
    remaining = [factor for dim in source.dims for factor in dim]
    dims: list[tuple[tuple[int, bool], ...]] = []
    for wanted in shape(node):
        factors: list[tuple[int, bool]] = []
        while wanted != 1:
            if not remaining:
                return None
            size, digit = remaining.pop(0)
            if wanted % size == 0:
                factors.append((size, digit))
                wanted //= size
            elif size % wanted == 0:
                factors.append((wanted, digit))
                remaining.insert(0, (size // wanted, digit))
                wanted = 1
            else:
                return None
        dims.append(tuple(factors))
    return _Counting(tuple(dims))


def _expanded(source: _Counting, node: fx.Node) -> _Counting:
    sizes = shape(node)
    new = len(sizes) - len(source.dims)
    padded = [*[()] * new, *source.dims]
    expanded = [dim if dim or size == 1 else ((size, False),) for dim, size in zip(padded, sizes, strict=True)]
    return _Counting(tuple(expanded))


def _each_repeated(source: _Counting, node: fx.Node) -> _Counting:
    times, dim = argument(node, "repeats"), argument(node, "dim")
    dims = list(source.dims)
    dims[dim] = (*dims[dim], *(((times, False),) if times != 1 else ()))
    return _Counting(tuple(dims))


_ARANGES = frozenset({aten.arange.default, aten.arange.start, aten.arange.start_step})
# what leaves the numbers of its input as they are, and where they are then
_FOLLOWED: Mapping[Any, Callable[[_Counting, fx.Node], _Counting | None]] = {
    aten.reshape.default: _regrouped,
    aten.expand.default: _expanded,
    aten.repeat_interleave.self_int: _each_repeated,
    aten._to_copy.default: lambda source, node: source,
}
