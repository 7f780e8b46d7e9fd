"""Where padding is, and the nodes that add it, remove it, or fill it with a number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ..core.annotations import shape
from ..core.sharding import Shard
from ..ir.program import Axis
from ..ops.catalog import op_spec
from ..ops.rank_local import padding_of

aten = torch.ops.aten


def local_shapes(sizes: Sequence[int], sharding: Sequence[object], axes: Sequence[Axis]) -> list[tuple[int, ...]]:
    """Return the shape of a rank's part after each axis, the whole shape first."""
    shapes = [tuple(sizes)]
    for kind, axis in zip(sharding, axes, strict=False):
        local = list(shapes[-1])
        if isinstance(kind, Shard):
            rows = kind.parts * kind.unit
            local[kind.dim] = rows * math.ceil(local[kind.dim] / (rows * axis.size))
        shapes.append(tuple(local))
    return shapes


def dims_with_padding(sizes: Sequence[int], sharding: Sequence[object], axes: Sequence[Axis]) -> frozenset[int]:
    """Return the dims of which ranks together have more places than there are indices."""
    dims = set[int]()
    for kind, axis, outer in zip(sharding, axes, local_shapes(sizes, sharding, axes), strict=False):
        if isinstance(kind, Shard) and outer[kind.dim] % (kind.parts * kind.unit * axis.size):
            dims.add(kind.dim)
    return frozenset(dims)


@dataclass(frozen=True)
class Resize:
    """Pad or trim the end of each of ``parts`` equal chunks of ``dim``, from size ``before`` to ``after``."""

    dim: int
    parts: int
    before: int
    after: int


@dataclass(frozen=True)
class Fill:
    """Replace the padding of ``dim`` by ``number``.

    Attributes:
        dim: the dim.
        number: what is in the padding afterwards.
        count: the size of the dim on a rank, with padding.
        cuts: how the dim is split, as the node says it: the whole size, then columns of axes, sizes, parts and units.
    """

    dim: int
    number: float
    count: int
    cuts: tuple[object, ...]


def peel(node: fx.Node) -> tuple[fx.Node, Resize | Fill] | None:
    """Return the value that a node pads, trims or fills, and which of these it does; None for any other node."""
    return _fill(node) or _resize(node)


def without_fill(node: fx.Node) -> fx.Node:
    """Return the value whose padding ``node`` fills, or ``node`` itself."""
    while (peeled := peel(node)) is not None and isinstance(peeled[1], Fill):
        node = peeled[0]
    return node


def fills_of(node: fx.Node) -> dict[int, float]:
    """Return the number that fills each dim's padding, where ``node`` is filled."""
    numbers: dict[int, float] = {}
    while (peeled := peel(node)) is not None and isinstance(peeled[1], Fill):
        node, fill = peeled[0], peeled[1]
        numbers = {fill.dim: fill.number} | numbers
    return numbers


def _fill(node: fx.Node) -> tuple[fx.Node, Fill] | None:
    masked = _masked(node)
    if masked is None:
        return None
    x, mask, number = masked
    inner_dims = 0
    if op_spec(mask).reshapes:
        inner_dims = len(shape(mask)) - 1
        if any(size != 1 for size in shape(mask)[1:]):
            return None
        mask = mask.all_input_nodes[0]
    if mask.target is not padding_of:
        return None
    count, *cuts = mask.args[:-1]
    return x, Fill(len(shape(x)) - 1 - inner_dims, number, count, tuple(cuts))  # type: ignore[arg-type]


def _masked(node: fx.Node) -> tuple[fx.Node, fx.Node, float] | None:
    """Return the value, the mask and the number of a masked fill; floats of 8 bits have an operator of their own."""
    if node.target is aten.masked_fill.Scalar:
        x, mask, number = node.args[:3]
    elif node.target is aten.where.ScalarSelf:
        mask, number, x = node.args[:3]
    else:
        return None
    if not isinstance(x, fx.Node) or not isinstance(mask, fx.Node):
        return None
    return x, mask, float(number)  # type: ignore[arg-type]


def _resize(node: fx.Node) -> tuple[fx.Node, Resize] | None:
    inner = node.all_input_nodes[0] if op_spec(node).reshapes else node
    resized = _resize_of_one_part(inner)
    if resized is None or inner is node:
        return resized
    # several parts, which are a dim of their own in between
    view, resize = resized
    if not op_spec(view).reshapes or resize.dim == 0:
        return None
    dim, parts = resize.dim - 1, shape(view)[resize.dim - 1]
    x = view.all_input_nodes[0]
    outer, inner_sizes = shape(x)[:dim], shape(x)[dim + 1 :]
    viewed = (*outer, parts, resize.before, *inner_sizes)
    result = (*outer, parts * resize.after, *inner_sizes)
    if tuple(shape(inner.all_input_nodes[0])) != viewed or tuple(shape(node)) != result:
        return None
    return x, Resize(dim, parts, parts * resize.before, parts * resize.after)


def _resize_of_one_part(node: fx.Node) -> tuple[fx.Node, Resize] | None:
    if op_spec(node).slices:
        x, dim, start, end, *step = node.args
        if start != 0 or step or not isinstance(x, fx.Node):
            return None
        return x, Resize(dim, 1, shape(x)[dim], end)  # type: ignore[arg-type,index]
    if node.target is aten.constant_pad_nd.default and len(node.args) == 2:
        x, widths = node.all_input_nodes[0], list(node.args[1])  # type: ignore[arg-type]
        dim = len(shape(x)) - len(widths) // 2
        if widths and not any(widths[:-1]) and widths[-1] > 0:
            return x, Resize(dim, 1, shape(x)[dim], shape(x)[dim] + widths[-1])
    return None
