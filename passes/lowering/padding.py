"""Add and remove padding in a rank's program, and fill it (see :mod:`...strategies.padding_fills`)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from ...core.annotations import shape, value
from ...core.sharding import Shard, Sharding
from ...ir.builder import GraphBuilder
from ...ir.program import Axis
from ...ops.catalog import op_spec
from ...ops.rank_local import padding_of
from ...ops.rules.notation import Factors

aten = torch.ops.aten
_SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor})


@dataclass
class Padding:
    """Adds and removes padding in a rank's program, and fills it.

    Attributes:
        zeros: for each node, the dims whose padding is certainly zeros.
        fills: the filled values, which users in the same ``stage`` share.
        masks: for each layout of a dim, the mask of its padding.
    """

    builder: GraphBuilder
    axes: Sequence[Axis]
    stage: int | None = None
    zeros: dict[fx.Node, frozenset[int]] = field(default_factory=dict)
    fills: dict[tuple[fx.Node, frozenset[int], float, int | None], fx.Node] = field(default_factory=dict)
    masks: dict[Hashable, fx.Node] = field(default_factory=dict)

    def filled(
        self, x: fx.Node, sizes: Sequence[int], sharding: Sharding, dims: frozenset[int], fill: float = 0.0
    ) -> fx.Node:
        """Return ``x``, the local part of a value of shape ``sizes``, with ``fill`` in the padding of ``dims``.

        Gradients of padding are zeros, too.
        """
        if not dims:
            return x
        key = (x, dims, fill, self.stage)
        if key in self.fills:
            return self.fills[key]
        filled = x
        for dim in sorted(dims):
            mask = self._mask(x, sizes, sharding, dim)
            if value(x).is_floating_point() and value(x).itemsize == 1:  # masked_fill does not support these
                filled = self.builder.call(aten.where.ScalarSelf, mask, fill, filled)
            else:
                filled = self.builder.call(aten.masked_fill.Scalar, filled, mask, fill)
        self.fills[key] = filled
        if not fill:
            self.zeros[filled] = self.zeros.get(x, frozenset()) | dims
        return filled

    def _mask(self, x: fx.Node, sizes: Sequence[int], sharding: Sharding, dim: int) -> fx.Node:
        """Return a mask of the padding of ``dim`` that broadcasts with ``x``."""
        splits = [
            (axis.name, axis.size, kind.parts, kind.unit)
            for axis, kind in zip(self.axes, sharding, strict=True)
            if isinstance(kind, Shard) and kind.dim == dim
        ]
        count, columns = shape(x)[dim], [list(column) for column in zip(*splits, strict=True)]
        key = (count, sizes[dim], *splits)
        if key not in self.masks:
            self.masks[key] = self.builder.call(padding_of, count, sizes[dim], *columns, value(x).device)
        return self.builder.reshape(self.masks[key], [count, *[1] * (len(shape(x)) - dim - 1)])

    def extended(self, x: fx.Node, dim: int, parts: int, size: int, *, padded: bool) -> fx.Node:
        """Return ``x`` with zeros at the end of each of its ``parts``, so that ``dim`` has ``size`` indices.

        ``padded``: whether the dim has padding of another axis already, whose values stay as they are.
        """
        old_size = shape(x)[dim]
        if old_size == size:
            return x
        trailing_dims = len(shape(x)) - 1 - dim
        view = self._split_parts(x, dim, parts)
        widths = [0] * (2 * trailing_dims) + [0, (size - old_size) // parts]
        extended = self.builder.call(aten.constant_pad_nd.default, view, widths)
        extended = self._join_parts(extended, shape(x), dim, size)
        self.zeros[extended] = self.zeros.get(x, frozenset()) | (frozenset() if padded else {dim})
        return extended

    def trimmed(self, x: fx.Node, dim: int, parts: int, size: int) -> fx.Node:
        """Return ``x`` without the end of each of its ``parts``, so that ``dim`` has ``size`` indices."""
        if shape(x)[dim] == size:
            return x
        view = self._split_parts(x, dim, parts)
        trimmed_dim = dim if parts == 1 else dim + 1
        trimmed = self.builder.call(aten.slice.Tensor, view, trimmed_dim, 0, size // parts)
        trimmed = self._join_parts(trimmed, shape(x), dim, size)
        self.zeros[trimmed] = self.zeros.get(x, frozenset()) - {dim}
        return trimmed

    def _split_parts(self, x: fx.Node, dim: int, parts: int) -> fx.Node:
        size = shape(x)
        return x if parts == 1 else self.builder.reshape(x, [*size[:dim], parts, size[dim] // parts, *size[dim + 1 :]])

    def _join_parts(self, x: fx.Node, old_size: Sequence[int], dim: int, size: int) -> fx.Node:
        return self.builder.reshape(x, [*old_size[:dim], size, *old_size[dim + 1 :]])

    def copy_zeros(self, x: fx.Node, converted: fx.Node) -> None:
        """Record that a conversion of ``x`` has zeros in the same padding."""
        self.zeros.setdefault(converted, self.zeros.get(x, frozenset()))

    def keeps_zeros(self, node: fx.Node, factors: Factors, inputs: Iterable[tuple[fx.Node, frozenset[int]]]) -> bool:
        """Return whether an elementwise operator maps zeros to zeros, and its inputs have zeros in all padding.

        ``inputs``: the local inputs, each with the dims that have padding.
        """
        linear = factors.linear == ((0,),) and len(factors.inputs) == 1
        linear = linear and op_spec(node).user_derivative != "tangent"  # returns a gradient, too
        if op_spec(node).cast_step == "cast":  # the scale does not matter
            linear, inputs = True, list(inputs)[:1]
        adds_tensors = node.target in _SUMS and len(factors.inputs) == 2
        return (linear or adds_tensors or op_spec(node).keeps_zero) and all(
            self.zeros.get(x, frozenset()) >= dims for x, dims in inputs
        )
