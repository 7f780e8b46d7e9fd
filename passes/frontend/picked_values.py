"""Rows that are picked by value, and what indexes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...compat.torch import free_unbacked_symbols, pytree
from ...core.annotations import origin, shape
from ...ops.catalog import op_spec

aten = torch.ops.aten
_SIZES_FIRST = (aten.zeros.default, aten.ones.default, aten.full.default)
_SIZES_SECOND = (aten.view.default, aten.reshape.default, aten.expand.default, aten.new_zeros.default,
                 aten.new_ones.default, aten.new_full.default)  # fmt: skip


@dataclass(frozen=True)
class Picked:
    """The positions at which a ``mask`` is true."""

    mask: fx.Node

    @property
    def sizes(self) -> tuple[int, ...]:
        return shape(self.mask)

    @property
    def axes(self) -> tuple[int, ...]:
        return tuple(range(len(self.sizes)))

    def axes_except(self, axes: Sequence[int]) -> list[int]:
        """Return the axes of the mask that are not among ``axes``."""
        return [axis for axis in self.axes if axis not in axes]


@dataclass(frozen=True)
class Positions:
    """All coordinates of picked positions, [u, dims]; with ``axis``: one coordinate, [u]."""

    picked: Picked
    axis: int | None = None


@dataclass(frozen=True)
class PickedValue:
    """A value with one row for each picked position along ``dim``.

    ``node`` has a row for every position of these ``axes`` of the mask.
    """

    node: fx.Node
    picked: Picked
    dim: int
    axes: tuple[int, ...]


@dataclass(frozen=True)
class Count:
    """The number of picked positions."""

    picked: Picked


PICKED_CLASSES = (Positions, PickedValue, Count)


def picks(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a captured operator picks rows by value, or reads picked rows."""
    if any(isinstance(x, PICKED_CLASSES) for x in pytree.tree_leaves((args, kwargs))):
        return True
    if node.target is aten.index.Tensor:
        return bool(free_unbacked_symbols(node.meta["val"]))
    return op_spec(node).finds


@dataclass(frozen=True)
class Indices:
    """Positions that index adjacent dims of a value, from ``dim`` on. ``axes``: of each, its axis of the mask."""

    dim: int
    picked: Picked
    axes: list[int]

    @property
    def sizes(self) -> list[int]:
        """Return the sizes that the indexed dims have to have."""
        return [self.picked.sizes[axis] for axis in self.axes]

    @property
    def next_dim(self) -> int:
        """Return the first dim after the indexed ones."""
        return self.dim + len(self.axes)

    def match_sizes_of(self, x: fx.Node) -> bool:
        """Return whether the indexed dims of ``x`` have the sizes of the mask."""
        return list(shape(x)[self.dim : self.next_dim]) == self.sizes


def size_of(x: Positions | PickedValue, dim: int) -> Count | int:
    """Return the size of a dim: the number of picked rows, or a number that is known."""
    if isinstance(x, Positions) or dim % len(shape(x.node)) == x.dim:
        return Count(x.picked)
    return shape(x.node)[dim]


def has_rows_of(source: Any, x: fx.Node, indices: Indices) -> bool:
    """Return whether a value has rows that may be written to ``x`` at ``indices``."""
    if not isinstance(source, PickedValue) or source.picked != indices.picked or source.dim != indices.dim:
        return False
    return len(shape(source.node)) == len(shape(x)) - len(indices.axes) + 1


def counts_rows(node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether the number of picked rows is used as anything but a size."""
    sizes: Any = []
    if node.target in _SIZES_FIRST:
        sizes = args[0]
    elif node.target in _SIZES_SECOND:
        sizes = args[1]
    counts, in_sizes = (sum(isinstance(x, Count) for x in pytree.tree_leaves(tree)) for tree in ((args, kwargs), sizes))
    return counts != in_sizes


def true_at_most_once(mask: fx.Node, axes: Sequence[int]) -> bool:
    """Return whether a mask is true at most once along its last dim, such as the indices of a topk == a number."""
    if mask.target is not aten.eq.Scalar or list(axes) != [len(shape(mask)) - 1]:
        return False
    source, output = origin(mask.args[0])  # type: ignore[arg-type]
    if source.target is not aten.topk.default or output != 1:
        return False
    dim = source.args[2] if len(source.args) > 2 else -1
    return dim in (-1, len(shape(mask)) - 1)
