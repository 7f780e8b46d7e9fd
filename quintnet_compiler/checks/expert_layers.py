"""Check of an expert layer on ranks, read from its result backwards.

Rows travel to the ranks that hold their experts (``dispatch``), are grouped by expert there, multiplied, put back in
order, and return as they came (``combine``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..core.annotations import is_getitem, needs_grad, origin, shape, tensor_inputs
from ..core.sharding import AxisType, I, P, R, Shard, parse_type
from ..ir.program import Axis, Strategy
from ..ops.catalog import op_spec
from ..ops.experts.grouped_rows import grouped_linear
from ..ops.extensions import extension
from ..ops.op_spec import Routing
from ..ops.rank_local import local_experts
from .extensions import ExpertCopiesCheck, LayerError

PlanParts = tuple[fx.Node, fx.Node]  # the two results of a plan
Move = tuple[str, AxisType, AxisType]  # an axis, and the types before and after
ReadProduct = Callable[[fx.Node], tuple[fx.Node, fx.Node]]  # of a product: its rows, and the end of each expert's


@dataclass(frozen=True)
class ExpertRoute:
    """The split of an expert layer over the axes of the mesh.

    Attributes:
        experts: the number of experts of the layer.
        travel: the axes on which rows travel, see :func:`axes_of_travel`.
        splits: the axes that split experts.
        arriving: the moves of rows between their arrival and the product.
        leaving: the moves of the product before it returns.
    """

    experts: int
    travel: Sequence[tuple[Axis, int]]
    splits: Sequence[Axis]
    arriving: Sequence[Move]
    leaving: Sequence[Move]

    @property
    def split_names(self) -> list[str]:
        """Return the names of the axes that split experts."""
        return [axis.name for axis in self.splits]

    @property
    def split_sizes(self) -> list[int]:
        """Return the sizes of the axes that split experts."""
        return [axis.size for axis in self.splits]


@dataclass(frozen=True)
class _Dispatches:
    """The dispatches of a layer's rows, outermost axis first.

    Attributes:
        ids: the expert of each row that arrived.
        rows: the rows that arrived.
        plans: each plan with its parts.
        hot: experts of which every rank has a copy.
    """

    ids: fx.Node
    rows: fx.Node
    plans: tuple[tuple[fx.Node, PlanParts], ...]
    hot: list[int]


def expert_route(axes: Sequence[Axis], strategies: Sequence[Strategy], experts: int) -> ExpertRoute:
    """Return how ``strategies`` split a layer of so many experts."""
    arriving, leaving = list[Move](), list[Move]()
    for axis, strategy in zip(axes, strategies, strict=True):
        if strategy.inside is None:
            continue
        rows, result = strategy.inside
        if strategy.inputs[0] != rows:
            arriving.append((axis.name, strategy.inputs[0], rows))
        if result != strategy.outputs[0]:
            leaving.append((axis.name, result, strategy.outputs[0]))
    splits = [axis for axis, strategy in zip(axes, strategies, strict=True) if _splits_rows(strategy.inputs[2])]
    return ExpertRoute(experts, axes_of_travel(axes, strategies), splits, arriving, leaving)


def axes_of_travel(axes: Sequence[Axis], strategies: Sequence[Strategy]) -> list[tuple[Axis, int]]:
    """Return the axes on which rows and experts are both split, so that rows have to travel.

    Each comes with the number of parts into which the axes before it split the experts.
    """
    travel, parts = list[tuple[Axis, int]](), 1
    for axis, strategy in zip(axes, strategies, strict=True):
        splits_experts = _splits_rows(strategy.inputs[2])
        if _splits_rows(strategy.inputs[0]) and splits_experts:
            travel.append((axis, parts))
        parts *= axis.size if splits_experts else 1
    return travel


def _splits_rows(kind: AxisType) -> bool:
    return isinstance(kind, Shard) and kind.dim == 0


def check_expert_layer(
    result: fx.Node, reads: Sequence[fx.Node], route: ExpertRoute, transposed: bool, read: ReadProduct | None = None
) -> None:
    """Check that ``result`` is what an expert layer makes of ``reads``.

    Args:
        result: the node that stands for the layer's result.
        reads: the rows, their experts' ids, and the weights, as a rank has them.
        route: how the layer is split.
        transposed: whether the weights are [experts, in, out].
        read: reads a product that is no plain grouped matmul, see :class:`.extensions.ExpertProductCheck`.

    Raises:
        LayerError: with what differs.
    """
    dispatches = _follow_dispatches(reads[1], reads[0], route)
    ungrouped = _undo_combines(result, dispatches)
    if not _routes(ungrouped, "ungroup") or not isinstance(ungrouped.args[0], fx.Node):
        raise LayerError(f"{ungrouped.name} is no product of grouped rows")
    product, leaving = _undo_moves(ungrouped.args[0])
    if leaving != route.leaving or (read is None and product.target is not grouped_linear):
        raise LayerError(f"{ungrouped.name} is no product of grouped rows, moved by {route.leaving}")
    grouped, ends = tensor_inputs(product)[:2] if read is None else read(product)
    grouped, arriving = _undo_moves(grouped)
    if arriving != route.arriving:
        raise LayerError(f"{product.name} reads rows that {arriving} moved, and not {route.arriving}")
    plan = _check_grouping(product, grouped, ends, ungrouped, dispatches.rows)
    if read is None:
        _check_weights(product, reads[2:], route, dispatches.hot, transposed)
    elif dispatches.hot:
        raise LayerError(f"{product.name} does not support hot experts")
    _check_group_plan(plan, shape(reads[2])[0], route, dispatches)


def _check_grouping(product: fx.Node, grouped: fx.Node, ends: fx.Node, ungrouped: fx.Node, rows: fx.Node) -> fx.Node:
    """Return the plan by which ``rows`` are grouped for ``product``, and its result is put back in order."""
    if not _routes(grouped, "group") or grouped.args != (rows, *ungrouped.args[1:]):
        raise LayerError(f"{product.name} reads rows in another order than {ungrouped.name} gives back")
    if ends is not ungrouped.args[2]:
        raise LayerError(f"{product.name} ends the rows of experts elsewhere than {ungrouped.name}")
    plan = origin(ends)[0]
    if not _routes(plan, "group plan") or _parts(plan) != ungrouped.args[1:]:
        raise LayerError(f"{ungrouped.name} is not grouped by a plan")
    return plan


def _follow_dispatches(ids: fx.Node, rows: fx.Node, route: ExpertRoute) -> _Dispatches:
    """Return the dispatches that send ``rows`` and ``ids`` over each axis of travel."""
    plans = list[tuple[fx.Node, PlanParts]]()
    hot: Any = None  # of the first plan; the others must have the same
    for axis, parts_before in route.travel:
        for plan in (n for n in ids.users if _routes(n, "plan") and n.args[1:3] == (axis.name, axis.size)):
            parts = _parts(plan)
            if parts is None or plan.args[3:5] != (route.experts, parts_before) or hot not in (None, plan.args[5]):
                continue
            sent_ids, sent_rows = (_dispatched(x, plan, parts) for x in (ids, rows))
            if sent_ids is not None and sent_rows is not None:
                ids, rows, hot = sent_ids, sent_rows, plan.args[5]
                plans.append((plan, parts))
                break
        else:
            raise LayerError(f"rows and their experts do not travel together over {axis.name}")
    return _Dispatches(ids, rows, tuple(plans), hot or [])


def _undo_combines(node: fx.Node, dispatches: _Dispatches) -> fx.Node:
    """Return the value whose rows ``node`` returns, by the same plans, to the ranks from which they came."""
    for plan, parts in dispatches.plans:
        if not _routes(node, "combine") or node.args[1:] != (*plan.args[1:3], *parts):
            raise LayerError(f"rows do not return over {plan.args[1]} as they went")
        node = node.args[0]  # type: ignore[assignment]
    return node


def _check_weights(
    product: fx.Node, stored: Sequence[fx.Node], route: ExpertRoute, hot: Sequence[int], transposed: bool
) -> None:
    weights, travel = tensor_inputs(product)[2:], [axis.name for axis, _ in route.travel]
    same = len(weights) == len(stored) and product.args[4] is transposed
    if not same or not all(_is_weight(a, b, hot, route, travel) for a, b in zip(weights, stored, strict=True)):
        raise LayerError(f"{product.name} reads other weights")


def _is_weight(node: fx.Node, stored: fx.Node, hot: Sequence[int], route: ExpertRoute, travel: Iterable[str]) -> bool:
    """Return whether ``node`` is ``stored``, a rank's experts, followed by the ``hot`` ones of all ranks."""
    if not hot:
        return node is stored
    parts: Any = node.args[0] if op_spec(node).joins and node.args[1:] == (0,) else ()
    if len(parts) != 2 or parts[0] is not stored:
        return False
    part, moves = _undo_moves(parts[1])
    types = {(source, target) for _, source, target in moves}
    summed = types == {(P, R if needs_grad(stored) else I)} and sorted(travel) == sorted(axis for axis, *_ in moves)
    copies = extension(part.target, ExpertCopiesCheck)
    return summed and copies is not None and copies.holds(part, stored, hot, route.splits)


def _check_group_plan(plan: fx.Node, stored_experts: int, route: ExpertRoute, dispatches: _Dispatches) -> None:
    """Check that ``plan`` groups the rows that arrived, by the experts of this rank."""
    ids, count, row_counts, _ = plan.args
    hot, arrived = dispatches.hot, dispatches.ids
    expected = route.experts, route.split_names, route.split_sizes, hot
    local_ids = [n for n in arrived.users if n.target is local_experts and n.args[1:] == expected]
    whole = ids is arrived and count == route.experts and not hot
    if count != stored_experts + len(hot) or not (ids in local_ids or whole):
        raise LayerError(f"{plan.name} is for other rows or experts")
    # where an axis without travel splits experts too, the counts that came with the rows include other ranks' experts
    after_travel = route.experts
    for axis, _ in route.travel:
        after_travel = math.ceil(after_travel / axis.size)
    sent_counts = dispatches.plans[-1][1][1] if dispatches.plans else None
    if row_counts is not None and (row_counts is not sent_counts or stored_experts != after_travel):
        raise LayerError(f"{plan.name} takes the counts of other rows")


def _undo_moves(node: fx.Node) -> tuple[fx.Node, list[Move]]:
    """Return the value that conversions carry to ``node``, and these conversions, in order."""
    moves = list[Move]()
    while op_spec(node).converts:
        axis, _, source, target = node.args[1:]
        moves.append((str(axis), parse_type(str(source)), parse_type(str(target))))
        node = node.all_input_nodes[0]
    return node, moves[::-1]


def _routes(node: fx.Node, step: Routing) -> bool:
    """Return whether ``node`` takes this step with the rows of a layer, and does not only begin it."""
    spec = op_spec(node)
    return spec.routing == step and not spec.under_way


def _parts(plan: fx.Node) -> PlanParts | None:
    parts = {int(n.args[1]): n for n in plan.users if is_getitem(n)}  # type: ignore[arg-type]
    return (parts[0], parts[1]) if len(parts) == 2 else None


def _dispatched(x: fx.Node, plan: fx.Node, parts: PlanParts) -> fx.Node | None:
    """Return ``x`` as sent by ``plan``."""
    return next((n for n in x.users if _routes(n, "dispatch") and n.args == (x, *plan.args[1:3], *parts)), None)
