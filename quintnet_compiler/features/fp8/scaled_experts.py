"""Layers of experts with fp8 products: scales of the rows that have arrived, and of their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from ...core.annotations import needs_grad, value
from ...core.sharding import AxisType, Shard
from ...ir.builder import GraphBuilder
from ...ir.program import Axis, Strategy
from ...ops.derivatives.user_derivatives import after_gradients, declare_gradient, with_tangent
from ...ops.experts.grouped_rows import grouped_bias_grad, grouped_weight_grad
from .ops.scaled_groups import group_cast, group_max, scaled_grouped_linear, scaled_grouped_weight_grad
from .ops.scaled_products import block_max, block_scale, scaled_cast
from .scales import largest_over

aten = torch.ops.aten
Cast = tuple[fx.Node, fx.Node]  # 8-bit numbers and their scale


@dataclass
class ScaledExperts:
    """Emit the fp8 product of a layer of experts on grouped rows, with its gradients.

    Before: %y = scaled_expert_linear(%x, %ids, %w, %bias, False, %w8, %w_scale, %back8, %back_scale, ...)
    After:  %y0 = scaled_grouped_linear(%x8, %ends, %w8, %x_scale, %w_scale, %bias);  %y1, %t = with_tangent(%y0)
            declare_gradient(%x, scaled_grouped_linear(%t8, %ends, %back8, ..., transposed))
            declare_gradient(%w, scaled_grouped_weight_grad(%t8', %x8', %ends, ...))
            %y = after_gradients(%y1, ...)
    Ensures: a scale of numbers that ranks split (features of a row, rows of an expert, all rows) is that of their
    largest on any rank.

    ``blocks``, ``gradient``, ``power_of_two`` and ``of_weight``: see :mod:`.ops.scaled_groups`.
    """

    builder: GraphBuilder
    axes: Sequence[Axis]
    strategies: Sequence[Strategy]
    blocks: Sequence[int]
    gradient: torch.dtype
    power_of_two: bool
    of_weight: bool
    declared: list[fx.Node] = field(default_factory=list)

    def __call__(
        self, rows: fx.Node, ends: fx.Node, weight: fx.Node, bias: fx.Node | None, transposed: bool, forward: Cast,
        back: tuple[fx.Node | None, fx.Node | None],
    ) -> fx.Node:  # fmt: skip
        """Emit the product, with the gradients that its inputs need."""
        call, dtype = self.builder.call, value(rows).dtype
        x, added = self._detached(rows), None if bias is None else self._detached(bias)
        x8 = self._cast_rows(x, ends, value(forward[0]).dtype, 0)
        out = call(scaled_grouped_linear, x8[0], ends, forward[0], x8[1], forward[1], added, transposed, dtype)
        if not any(needs_grad(source) for source in (rows, weight, bias) if source is not None):
            return out
        pair = call(with_tangent, out, True)
        out, tangent = (self.builder.getitem(pair, i) for i in range(2))
        tangent8 = self._cast_rows(tangent, ends, self.gradient, 1)
        if needs_grad(rows):
            args = tangent8[0], ends, back[0], tangent8[1], back[1], None, not transposed, dtype
            self._declare(rows, call(scaled_grouped_linear, *args))
        if needs_grad(weight):
            gradient = self._weight_gradient(tangent, x, ends, tangent8, x8, transposed, value(weight).dtype)
            self._declare(weight, gradient)
        if bias is not None and needs_grad(bias):
            self._declare(bias, call(grouped_bias_grad, tangent, ends))
        return call(after_gradients, out, self.declared)

    def _weight_gradient(
        self, tangent: fx.Node, x: fx.Node, ends: fx.Node, tangent8: Cast, x8: Cast, transposed: bool,
        dtype: torch.dtype,
    ) -> fx.Node:  # fmt: skip
        if not self.of_weight:
            return self.builder.call(grouped_weight_grad, tangent, x, ends, transposed)
        if self.blocks:
            tangent8 = self._cast_columns(tangent, ends, self.gradient)
            x8 = self._cast_columns(x, ends, value(x8[0]).dtype)
        (tangent8_numbers, tangent_scale), (x8_numbers, x_scale) = tangent8, x8
        return self.builder.call(
            scaled_grouped_weight_grad, tangent8_numbers, x8_numbers, ends, tangent_scale, x_scale, transposed, dtype
        )

    def _cast_rows(self, x: fx.Node, ends: fx.Node, dtype: torch.dtype, end: int) -> Cast:
        """Cast rows with a scale for each row or block of it, or with one for all.

        ``end``: 0 for the product's input, 1 for its result.
        """
        call, features = self.builder.call, self._axes_of_features(end)
        if self.blocks:
            block = self.blocks[end]
            largest = largest_over(self.builder, call(block_max, x, [1, block]), [] if block else features)
        else:
            split = [axis for axis in self.axes if axis in features or axis in self._axes_of_rows()]
            largest = largest_over(self.builder, call(block_max, call(group_max, x, ends), [0, 0]), split)
        scale = call(block_scale, largest, dtype, self.power_of_two)
        return call(scaled_cast, x, scale, dtype), scale

    def _cast_columns(self, x: fx.Node, ends: fx.Node, dtype: torch.dtype) -> Cast:
        """Cast with a scale for each column of an expert's rows."""
        largest = largest_over(self.builder, self.builder.call(group_max, x, ends), self._axes_of_replicas())
        scale = self.builder.call(block_scale, largest, dtype, self.power_of_two)
        return self.builder.call(group_cast, x, ends, scale, dtype), scale

    def _detached(self, x: fx.Node) -> fx.Node:
        return self.builder.call(aten.detach.default, x) if needs_grad(x) else x

    def _declare(self, x: fx.Node, gradient: fx.Node) -> None:
        self.declared.append(self.builder.getitem(self.builder.call(declare_gradient, x, gradient), 0))

    # -- axes that split values; each microbatch has its own scales

    def _axes_of_features(self, end: int) -> list[Axis]:
        """Return the axes that split the features of the product's input (0) or result (1)."""
        axes = []
        for axis, s in self._rank_axes():
            kinds = s.inside if s.inside is not None else (s.inputs[0], s.outputs[0])
            if _is_slice(kinds[end], 1):
                axes.append(axis)
        return axes

    def _axes_of_rows(self) -> list[Axis]:
        """Return the axes over which ranks multiply different rows."""
        return [axis for axis, s in self._rank_axes() if _is_slice(s.inputs[0], 0) or _is_slice(s.inputs[2], 0)]

    def _axes_of_replicas(self) -> list[Axis]:
        """Return the axes over which ranks multiply different rows by the same matrices."""
        return [axis for axis, s in self._rank_axes() if _is_slice(s.inputs[0], 0) and not _is_slice(s.inputs[2], 0)]

    def _rank_axes(self) -> list[tuple[Axis, Strategy]]:
        return [(axis, s) for axis, s in zip(self.axes, self.strategies, strict=True) if axis.role != "time"]


def _is_slice(kind: AxisType, dim: int) -> bool:
    return isinstance(kind, Shard) and kind.dim == dim
