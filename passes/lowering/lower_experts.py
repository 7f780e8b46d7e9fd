"""Layers of experts on one rank: rows travel to the ranks of their experts, are grouped there, and return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from ...ops.extensions import extension
from ...ops.rank_local import local_experts
from ...strategies.expert_axes import hops, row_conversions
from ...strategies.expert_copies import ExpertCopies
from .extensions import ExpertProduct

aten = torch.ops.aten
Plan = tuple[fx.Node, ...]


@dataclass(frozen=True)
class _Route:
    """Rows that have arrived at the ranks of their experts.

    Attributes:
        rows: the rows of this rank, [rows, features].
        ids: the expert of each row, [rows].
        experts: the number of experts on all ranks.
        split: the axes that split experts.
        hops: the axes over which rows travelled, each with its plan.
        copied: the experts of which every rank has a copy.
    """

    rows: fx.Node
    ids: fx.Node
    experts: int
    split: Sequence[Axis]
    hops: Sequence[tuple[Axis, Plan]]
    copied: Sequence[int]

    @property
    def names_and_sizes(self) -> tuple[list[str], list[int]]:
        """Return the names and sizes of the axes that split experts."""
        return [axis.name for axis in self.split], [axis.size for axis in self.split]


class LowerExperts:
    """Emit a layer of experts on one rank.

    Before: %y = expert_linear(%x: S(0), %ids: S(0), %w: S(0))
    After:  %plan = dispatch_plan(%ids, "ep");  %there = dispatch(%x, "ep", %plan)
            %group = group_plan(%local_ids);  %rows = group_rows(%there, %group)
            %made = grouped_linear(%rows, %group, %w);  %y = combine(ungroup_rows(%made, %group), "ep", %plan)

    Layers of the same ids share plans, and layers of the same rows share the rows that arrive. ``copies``: of experts,
    on every rank. Their weights, summed over the ranks that split them, follow the rank's own; their rows stay on their
    ranks.
    """

    def __init__(self, builder: GraphBuilder, sharded: ShardedProgram, copies: ExpertCopies | None) -> None:
        self.builder, self.axes, self.strategies, self.copies = builder, sharded.axes, sharded.strategies, copies
        self.copied = {} if copies is None else copies.experts(sharded.program.graph)
        self.plans: dict[tuple[Any, ...], Plan] = {}

    def __call__(
        self, node: fx.Node, stage: int | None, rows: fx.Node, ids: fx.Node, weight: fx.Node, bias: fx.Node | None,
        transposed: bool, *others: Any,
    ) -> fx.Node:  # fmt: skip
        """Emit ``node``, which belongs to ``stage``, on local inputs."""
        strategies = self.strategies[node]
        route = self._dispatch_rows(node, stage, rows, ids)
        on_host = counts_on_host(value(rows), value(weight))
        local_count = shape(weight)[0] + len(route.copied)
        grouped = self._group_plan(stage, route, local_count, on_host=on_host)
        if route.copied:
            weight = self._with_copies(stage, weight, route)
            bias = None if bias is None else self._with_copies(stage, bias, route)
        rows = self._shared(stage, group_rows, route.rows, *grouped)
        arriving, leaving = row_conversions(self.axes, strategies)
        for conversion in arriving:
            rows = self._shared(stage, convert, rows, *conversion)
        product = extension(node.target, ExpertProduct)
        if product is not None:
            arguments = rows, weight, bias, transposed, *others
            rows = product.emit(self.builder, self.axes, strategies, grouped[1], arguments)
        else:
            rows = self.builder.call(grouped_linear, rows, grouped[1], weight, bias, transposed)
        for conversion in leaving:
            rows = self.builder.call(convert, rows, *conversion)
        rows = self.builder.call(ungroup_rows, rows, *grouped)
        for axis, plan in reversed(route.hops):
            rows = self.builder.call(combine, rows, axis.name, axis.size, *plan)
        return rows

    def _dispatch_rows(self, node: fx.Node, stage: int | None, rows: fx.Node, ids: fx.Node) -> _Route:
        """Send rows, and the ids of their experts, to the ranks that have these, one axis after the other."""
        strategies, experts = self.strategies[node], shape(tensor_inputs(node)[2])[0]
        split = [
            axis
            for axis, strategy in zip(self.axes, strategies, strict=True)
            if isinstance(kind := strategy.inputs[2], Shard) and kind.dim == 0
        ]
        axes_on_route = hops(self.axes, strategies)
        copied = list(self.copied.get(node, ())) if axes_on_route else []
        plans = list[tuple[Axis, Plan]]()
        for axis, ways in axes_on_route:
            key = (ids, axis.name, experts, ways, stage)
            if key not in self.plans:
                plan = self._items(self.builder.call(dispatch_plan, ids, axis.name, axis.size, experts, ways, copied))
                self.plans[key] = *plan, self.builder.call(dispatch, ids, axis.name, axis.size, *plan)
            plan, ids = self.plans[key][:-1], self.plans[key][-1]
            rows = self._shared(stage, dispatch, rows, axis.name, axis.size, *plan)
            plans.append((axis, plan))
        return _Route(rows, ids, experts, split, plans, copied)

    def _group_plan(self, stage: int | None, route: _Route, local_count: int, *, on_host: bool) -> Plan:
        """Return the plan that groups rows by the ``local_count`` experts of this rank.

        Where the host needs the number of rows of each expert, and it has travelled with the rows, it is not counted
        again.
        """
        key = (route.ids, *route.split, on_host, stage)
        if key not in self.plans:
            ids = route.ids
            if route.split:
                ids = self.builder.call(local_experts, ids, route.experts, *route.names_and_sizes, route.copied)
            counts = None
            if on_host and route.hops and len(route.hops) == len(route.split):
                counts = route.hops[-1][1][1]
            self.plans[key] = self._items(self.builder.call(group_plan, ids, local_count, counts, on_host))
        return self.plans[key]

    def _with_copies(self, stage: int | None, stored: fx.Node, route: _Route) -> fx.Node:
        """Return the parameters of a rank's experts, followed by copies of others."""
        key = (stored, "copies", stage)
        if key not in self.plans:
            assert self.copies is not None
            added = self.copies.emit_part(self.builder, stored, route.copied, route.split)
            for axis, _ in route.hops:
                replicated = str(R if needs_grad(stored) else I)
                added = self.builder.call(convert, added, axis.name, axis.size, str(P), replicated)
            self.plans[key] = (self.builder.call(aten.cat.default, [stored, added], 0),)
        return self.plans[key][0]

    def _shared(self, stage: int | None, target: Any, *args: Any) -> fx.Node:
        """Return a call that layers of a mixture share."""
        key = (stage, target, *args)
        if key not in self.plans:
            self.plans[key] = (self.builder.call(target, *args),)
        return self.plans[key][0]

    def _items(self, results: fx.Node) -> Plan:
        return tuple(self.builder.getitem(results, i) for i in range(len(values(results))))
