"""What a rank runs for a layer of experts: rows travel to the ranks of these, are grouped there, and return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ...core.annotations import needs_grad, shape, tensor_inputs, value, values
from ...core.sharding import I, P, R, Shard
from ...ir.builder import GraphBuilder
from ...ir.program import Axis, ShardedProgram
from ...ops.collectives import combine, convert, dispatch, dispatch_plan
from ...ops.experts.expert_linear import counts_on_host
from ...ops.experts.grouped_rows import group_plan, group_rows, grouped_linear, ungroup_rows
from ...ops.rank_local import local_experts, pick_experts
from ..strategies.expert_axes import hops, row_conversions
from .scaled_experts import ScaledExperts

aten = torch.ops.aten
Plan = tuple[fx.Node, ...]
Way = Sequence[tuple[Axis, Plan]]


class LowerExperts:
    """Before: %y = expert_linear(%x: S(0), %ids: S(0), %w: S(0))
    After:  %plan = dispatch_plan(%ids, "ep");  %there = dispatch(%x, "ep", %plan)
            %group = group_plan(%local_ids);  %rows = group_rows(%there, %group)
            %made = grouped_linear(%rows, %group, %w);  %y = combine(ungroup_rows(%made, %group), "ep", %plan)

    Layers of the same ids share plans, and those of the same rows what arrives. ``hot``: of layers, the experts that
    every rank has (:mod:`..strategies.hot_experts`): their weights are picked and added up over the ranks that split
    them, behind a rank's own, and their rows stay.
    """

    def __init__(self, builder: GraphBuilder, sharded: ShardedProgram, hot: Mapping[fx.Node, tuple[int, ...]]) -> None:
        self.builder, self.axes, self.strategies, self.hot = builder, sharded.axes, sharded.strategies, hot
        self.planned: dict[tuple[Any, ...], Plan] = {}

    def __call__(
        self, node: fx.Node, stage: int | None, rows: fx.Node, ids: fx.Node, weight: fx.Node, bias: fx.Node | None,
        transposed: bool, *scaled: Any,
    ) -> fx.Node:  # fmt: skip
        """``node``, which belongs to ``stage``, on local inputs."""
        call, experts, chosen = self.builder.call, shape(tensor_inputs(node)[2])[0], self.strategies[node]
        split = [
            a for a, one in zip(self.axes, chosen, strict=True) if isinstance(k := one.inputs[2], Shard) and k.dim == 0
        ]
        way, passed = list[tuple[Axis, Plan]](), hops(self.axes, chosen)
        hot = list(self.hot.get(node, ())) if passed else []
        for axis, ways in passed:
            known = (ids, axis.name, experts, ways, stage)
            if known not in self.planned:
                plan = self._parts(call(dispatch_plan, ids, axis.name, axis.size, experts, ways, hot))
                self.planned[known] = *plan, call(dispatch, ids, axis.name, axis.size, *plan)
            plan, ids = self.planned[known][:-1], self.planned[known][-1]
            rows = self._shared(stage, dispatch, rows, axis.name, axis.size, *plan)
            way.append((axis, plan))
        own, on_host = shape(weight)[0] + len(hot), counts_on_host(value(rows), value(weight))
        grouped = self._group_plan(stage, ids, experts, own, split, way, hot, on_host=on_host)
        if hot:
            weight = self._with_hot(stage, weight, hot, split, way)
            bias = None if bias is None else self._with_hot(stage, bias, hot, split, way)
        rows = self._shared(stage, group_rows, rows, *grouped)
        arriving, leaving = row_conversions(self.axes, chosen)
        for move in arriving:
            rows = self._shared(stage, convert, rows, *move)
        if scaled:
            weight8, scale, back8, back_scale, *how = scaled
            product = ScaledExperts(self.builder, self.axes, chosen, *how)
            rows = product(rows, grouped[1], weight, bias, transposed, (weight8, scale), (back8, back_scale))
        else:
            rows = call(grouped_linear, rows, grouped[1], weight, bias, transposed)
        for move in leaving:
            rows = call(convert, rows, *move)
        rows = call(ungroup_rows, rows, *grouped)
        for axis, plan in reversed(way):
            rows = call(combine, rows, axis.name, axis.size, *plan)
        return rows

    def _group_plan(
        self, stage: int | None, ids: fx.Node, experts: int, own: int, split: Sequence[Axis], way: Way,
        hot: Sequence[int], *, on_host: bool,
    ) -> Plan:  # fmt: skip
        """The plan of the rows of a rank's ``own`` experts. Where the host needs to know how many each gets, and that
        has travelled with the rows, it is not counted again."""
        known = (ids, *split, on_host, stage)
        if known not in self.planned:
            if split:
                names, sizes = [axis.name for axis in split], [axis.size for axis in split]
                ids = self.builder.call(local_experts, ids, experts, names, sizes, hot)
            counts = way[-1][1][1] if on_host and way and len(way) == len(split) else None
            self.planned[known] = self._parts(self.builder.call(group_plan, ids, own, counts, on_host))
        return self.planned[known]

    def _with_hot(
        self, stage: int | None, stored: fx.Node, hot: Sequence[int], split: Sequence[Axis], way: Way
    ) -> fx.Node:
        """What a rank has of its experts, and behind it what all ranks have of hot ones."""
        known = (stored, "hot", stage)
        if known not in self.planned:
            names, sizes = [axis.name for axis in split], [axis.size for axis in split]
            picked = self.builder.call(pick_experts, stored, hot, shape(stored)[0], names, sizes)
            for axis, _ in way:
                whole = str(R if needs_grad(stored) else I)
                picked = self.builder.call(convert, picked, axis.name, axis.size, str(P), whole)
            self.planned[known] = (self.builder.call(aten.cat.default, [stored, picked], 0),)
        return self.planned[known][0]

    def _shared(self, stage: int | None, target: Any, *args: Any) -> fx.Node:
        """A call that layers of a mixture have in common."""
        known = (stage, target, *args)
        if known not in self.planned:
            self.planned[known] = (self.builder.call(target, *args),)
        return self.planned[known][0]

    def _parts(self, made: fx.Node) -> Plan:
        return tuple(self.builder.getitem(made, i) for i in range(len(values(made))))
