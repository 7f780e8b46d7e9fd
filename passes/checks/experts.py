"""Check of an ``expert_linear`` on ranks: its rows travel to the ranks that hold their experts, are grouped by expert
there, and go back as they came."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import fx

from ...core.annotations import is_getitem, origin, shape, tensor_inputs
from ...core.sharding import Shard
from ...ir.program import Axis, Strategy
from ...ops.collectives import combine, dispatch, dispatch_plan
from ...ops.grouped_rows import group_plan, group_rows, grouped_linear, ungroup_rows
from ...ops.rank_local import local_experts

Plan = tuple[fx.Node, fx.Node]  # the two parts of a plan


def travels(axes: Sequence[Axis], chosen: Sequence[Strategy]) -> list[tuple[Axis, int]]:
    """The axes on which rows and experts are both split, so that rows have to travel, each with in how many ways the
    axes before it split the experts."""
    found, ways = list[tuple[Axis, int]](), 1
    for axis, strategy in zip(axes, chosen, strict=True):
        rows, experts = (isinstance(kind := strategy.inputs[i], Shard) and kind.dim == 0 for i in (0, 2))
        if rows and experts:
            found.append((axis, ways))
        ways *= axis.size if experts else 1
    return found


def wrong_way(
    made: fx.Node, reads: Sequence[fx.Node], way: Sequence[tuple[Axis, int]], experts: int, transposed: bool
) -> str:
    """What is wrong with rows that travel to a linear layer of so many experts, and back as ``made``; empty where
    nothing is."""
    rows, ids = reads[:2]
    plans, counts = list[tuple[fx.Node, Plan]](), None
    for axis, ways in way:
        for planned in (n for n in ids.users if n.target is dispatch_plan and n.args[1:3] == (axis.name, axis.size)):
            plan = _parts(planned)
            routed = [_routed(x, planned, plan) for x in (ids, rows)] if plan else [None]
            if routed[0] is not None and routed[1] is not None and planned.args[3:] == (experts, ways):
                assert plan is not None
                ids, rows = routed[0], routed[1]
                plans.append((planned, plan))
                counts = plan[1]
                break
        else:
            return f"rows and their experts do not travel together over {axis.name}"
    for planned, plan in plans:
        if made.target is not combine or made.args[1:] != (*planned.args[1:3], *plan):
            return f"rows do not return over {planned.args[1]} as they went"
        made = made.args[0]  # type: ignore[assignment]
    product = made.args[0]
    if made.target is not ungroup_rows or not isinstance(product, fx.Node) or product.target is not grouped_linear:
        return f"{made.name} is no product of grouped rows"
    grouped, ends = tensor_inputs(product)[:2]
    if grouped.target is not group_rows or grouped.args != (rows, *made.args[1:]) or ends is not made.args[2]:
        return f"{product.name} reads rows in another order than {made.name} gives back"
    planned, weights = origin(ends)[0], list(reads[2:])
    if planned.target is not group_plan or _parts(planned) != made.args[1:]:
        return f"{made.name} is not grouped by a plan"
    if tensor_inputs(product)[2:] != weights or product.args[4] is not transposed:
        return f"{product.name} reads other weights"
    mine, own, told, _ = planned.args
    here = [n for n in ids.users if n.target is local_experts and n.args[1] == experts]
    if own != shape(weights[0])[0] or not (mine in here or (mine is ids and own == experts)):
        return f"{planned.name} is for other rows or experts"
    # what came with the rows counts those of no expert of this rank, too, where experts are split on another axis
    elsewhere = shape(weights[0])[0] * math.prod(axis.size for axis, _ in way) != experts
    if told is not None and (told is not counts or elsewhere):
        return f"{planned.name} takes the counts of other rows"
    return ""


def _parts(planned: fx.Node) -> Plan | None:
    """The parts of a plan, each a node."""
    found = {int(n.args[1]): n for n in planned.users if is_getitem(n)}  # type: ignore[arg-type]
    return (found[0], found[1]) if len(found) == 2 else None


def _routed(x: fx.Node, planned: fx.Node, plan: Plan) -> fx.Node | None:
    return next((n for n in x.users if n.target is dispatch and n.args == (x, *planned.args[1:3], *plan)), None)
