"""Check of an ``expert_linear`` whose rows travel: to the ranks that hold their experts, and back as they went."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ...core.annotations import tensor_inputs
from ...core.sharding import Shard
from ...ir.program import Axis, Strategy
from ...ops.collectives import combine, dispatch, dispatch_plan
from ...ops.expert_linear import expert_linear
from ...ops.rank_local import local_experts


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


def wrong_way(made: fx.Node, reads: Sequence[fx.Node], way: Sequence[tuple[Axis, int]], experts: int) -> str:
    """What is wrong with rows that travel to an ``expert_linear`` of so many experts, and back as ``made``; empty where
    nothing is."""
    rows, ids, *_ = reads
    plans = []
    for axis, ways in way:
        planned = (n for n in ids.users if n.target is dispatch_plan and n.args[1:3] == (axis.name, axis.size))
        for plan in planned:
            routed = [_routed(x, plan) for x in (ids, rows)]
            if routed[0] is not None and routed[1] is not None and plan.args[3:] == (experts, ways):
                ids, rows = routed[0], routed[1]
                plans.append(plan)
                break
        else:
            return f"rows and their experts do not travel together over {axis.name}"
    for plan in plans:
        if made.target is not combine or made.args[1:] != (*plan.args[1:3], plan):
            return f"rows do not return over {plan.args[1]} as they went"
        made = made.args[0]  # type: ignore[assignment]
    mine = [ids, *(n for n in ids.users if n.target is local_experts)]
    if made.target is not expert_linear or tensor_inputs(made)[0] is not rows or made.args[1] not in mine:
        return f"{made.name} reads {made.all_input_nodes}"
    if tensor_inputs(made)[2:] != list(reads[2:]):
        return f"{made.name} reads other weights"
    return ""


def _routed(x: fx.Node, plan: fx.Node) -> fx.Node | None:
    return next((n for n in x.users if n.target is dispatch and n.args == (x, *plan.args[1:3], plan)), None)
