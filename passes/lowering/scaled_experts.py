"""Layers of experts whose products are of 8-bit numbers: scales of rows that have arrived, and of their gradients."""

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
from ...ops.experts.scaled_groups import group_cast, group_max, scaled_grouped_linear, scaled_grouped_weight_grad
from ...ops.scaled_products import block_max, block_scale, scaled_cast
from .scales import largest_over

aten = torch.ops.aten
Cast = tuple[fx.Node, fx.Node]  # 8-bit numbers and their scale


@dataclass
class ScaledExperts:
    """Lower the product of a layer of experts on rows in the order of these, with the gradients that it has.

    Before: %y = scaled_expert_linear(%x, %ids, %w, %bias, False, %w8, %w_scale, %back8, %back_scale, ...)
    After:  %y0 = scaled_grouped_linear(%x8, %ends, %w8, %x_scale, %w_scale, %bias);  %y1, %t = with_tangent(%y0)
            declare_gradient(%x, scaled_grouped_linear(%t8, %ends, %back8, ..., transposed))
            declare_gradient(%w, scaled_grouped_weight_grad(%t8', %x8', %ends, ...))
            %y = after_gradients(%y1, ...)
    Ensures: a scale over what ranks split (features of a row, rows of an expert, all rows) is the largest of theirs.

    ``blocks``, ``gradient``, ``power_of_two`` and ``of_weight``: see :mod:`...ops.experts.scaled_groups`.
    """

    builder: GraphBuilder
    axes: Sequence[Axis]
    chosen: Sequence[Strategy]
    blocks: Sequence[int]
    gradient: torch.dtype
    power_of_two: bool
    of_weight: bool
    done: list[fx.Node] = field(default_factory=list)

    def __call__(
        self, rows: fx.Node, ends: fx.Node, weight: fx.Node, bias: fx.Node | None, transposed: bool, forward: Cast,
        back: tuple[fx.Node | None, fx.Node | None],
    ) -> fx.Node:  # fmt: skip
        call, dtype = self.builder.call, value(rows).dtype
        x, added = self._bare(rows), None if bias is None else self._bare(bias)
        cast = self._rows(x, ends, value(forward[0]).dtype, 0)
        made = call(scaled_grouped_linear, cast[0], ends, forward[0], cast[1], forward[1], added, transposed, dtype)
        if not any(needs_grad(one) for one in (rows, weight, bias) if one is not None):
            return made
        both = call(with_tangent, made, True)
        made, tangent = (self.builder.getitem(both, i) for i in range(2))
        arrived = self._rows(tangent, ends, self.gradient, 1)
        if needs_grad(rows):
            given = arrived[0], ends, back[0], arrived[1], back[1], None, not transposed, dtype
            self._declare(rows, call(scaled_grouped_linear, *given))
        if needs_grad(weight):
            self._declare(weight, self._of_weight(tangent, x, ends, arrived, cast, transposed, value(weight).dtype))
        if bias is not None and needs_grad(bias):
            self._declare(bias, call(grouped_bias_grad, tangent, ends))
        return call(after_gradients, made, self.done)

    def _of_weight(
        self, tangent: fx.Node, x: fx.Node, ends: fx.Node, arrived: Cast, cast: Cast, transposed: bool,
        dtype: torch.dtype,
    ) -> fx.Node:  # fmt: skip
        if not self.of_weight:
            return self.builder.call(grouped_weight_grad, tangent, x, ends, transposed)
        if self.blocks:
            arrived = self._columns(tangent, ends, self.gradient)
            cast = self._columns(x, ends, value(cast[0]).dtype)
        (t8, scale_t), (x8, scale_x) = arrived, cast
        return self.builder.call(scaled_grouped_weight_grad, t8, x8, ends, scale_t, scale_x, transposed, dtype)

    def _rows(self, x: fx.Node, ends: fx.Node, kind: torch.dtype, end: int) -> Cast:
        """Each row or block of it with a scale, or all rows of experts with one. ``end``: 0 for what the product reads,
        1 for what it makes."""
        call, features = self.builder.call, self._splitting(end)
        if self.blocks:
            block = self.blocks[end]
            largest = largest_over(self.builder, call(block_max, x, [1, block]), [] if block else features)
        else:
            apart = [axis for axis in self.axes if axis in features or axis in self._other_rows()]
            largest = largest_over(self.builder, call(block_max, call(group_max, x, ends), [0, 0]), apart)
        scale = call(block_scale, largest, kind, self.power_of_two)
        return call(scaled_cast, x, scale, kind), scale

    def _columns(self, x: fx.Node, ends: fx.Node, kind: torch.dtype) -> Cast:
        """Each column of an expert's rows with a scale."""
        largest = largest_over(self.builder, self.builder.call(group_max, x, ends), self._same_experts())
        scale = self.builder.call(block_scale, largest, kind, self.power_of_two)
        return self.builder.call(group_cast, x, ends, scale, kind), scale

    def _bare(self, x: fx.Node) -> fx.Node:
        return self.builder.call(aten.detach.default, x) if needs_grad(x) else x

    def _declare(self, x: fx.Node, gradient: fx.Node) -> None:
        self.done.append(self.builder.getitem(self.builder.call(declare_gradient, x, gradient), 0))

    # -- what ranks split; microbatches have scales of their own

    def _splitting(self, end: int) -> list[Axis]:
        """The axes that split the features of what the product reads (0) or makes (1)."""
        found = []
        for axis, one in zip(self.axes, self.chosen, strict=True):
            kinds = one.inside if one.inside is not None else (one.inputs[0], one.outputs[0])
            if axis.role != "time" and _is_slice(kinds[end], 1):
                found.append(axis)
        return found

    def _other_rows(self) -> list[Axis]:
        """The axes over which ranks multiply other rows."""
        return [a for a, one in self._ranks() if _is_slice(one.inputs[0], 0) or _is_slice(one.inputs[2], 0)]

    def _same_experts(self) -> list[Axis]:
        """The axes over which ranks multiply other rows by the same matrices."""
        return [a for a, one in self._ranks() if _is_slice(one.inputs[0], 0) and not _is_slice(one.inputs[2], 0)]

    def _ranks(self) -> list[tuple[Axis, Strategy]]:
        return [(a, one) for a, one in zip(self.axes, self.chosen, strict=True) if a.role != "time"]


def _is_slice(kind: AxisType, dim: int) -> bool:
    return isinstance(kind, Shard) and kind.dim == dim
