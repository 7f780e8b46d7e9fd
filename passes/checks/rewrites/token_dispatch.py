"""Check of tokens that stay where they are: dispatched and combined as before, every value is what it was.

Values are numbered by what makes them. A ``combine`` is not numbered where it stands, but where its rows are read in
their old order: operators that treat every row alone may come first, and a ``dispatch`` by the same plan cancels it.

Before that: of an ``expert_linear`` on ranks, rows travel to the ranks that hold their experts, are grouped by expert
there, and go back as they came (:func:`wrong_way`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ....core.annotations import facts, is_getitem, needs_grad, origin, shape, tensor_inputs
from ....core.errors import REPORT, CompileError
from ....core.sharding import AxisType, I, P, R, Shard, parse_type
from ....ir.program import Axis, LocalProgram, Strategy
from ....ir.value_numbers import ValueNumbers
from ....ops.collectives import combine, convert, dispatch, dispatch_plan
from ....ops.experts.grouped_rows import group_plan, group_rows, grouped_linear, ungroup_rows
from ....ops.rank_local import local_experts, pick_experts
from ....ops.rules.notation import Rule
from .scaled_experts import ScaledLayer, Wrong

aten = torch.ops.aten
Order = tuple[tuple[Any, int], ...]  # how the rows of a value are ordered: what would bring them back, last one first
Number = tuple[int, Order]


def check_token_dispatch(before: LocalProgram, after: LocalProgram, rules: Mapping[Any, Rule]) -> None:
    """Raises: CompileError QN209 with the first value that is another than ``before``."""
    numbers = ValueNumbers()
    old, new = _OrderedRows(before, rules, numbers), _OrderedRows(after, rules, numbers)
    for program, mine, others, what in ((before, old, new, "is lost"), (after, new, old, "was not there")):
        left = Counter[int | None](others.made.values())
        for node in program.graph.nodes:
            number = mine.made.get(node)
            left[number] -= 1
            if number is not None and left[number] < 0:
                raise CompileError("QN209", f"token dispatch: {node.name} {what}", where=facts(node).where, fix=REPORT)


class _OrderedRows:
    """``made``: the number of every value but those that only order rows; equal ones have equal numbers."""

    def __init__(self, program: LocalProgram, rules: Mapping[Any, Rule], numbers: ValueNumbers) -> None:
        self.program, self.rules, self.numbers = program, rules, numbers
        self.of: dict[fx.Node, Number] = {}
        self.made: dict[fx.Node, int] = {}
        for node in program.graph.nodes:
            self.of[node] = self._number(node)

    def _number(self, node: fx.Node) -> Number:
        if node.target in (combine, ungroup_rows):
            found, order = self.of[node.all_input_nodes[0]]
            return found, (self._plan(node), *order)
        if node.target in (dispatch, group_rows):
            found, order = self.of[node.all_input_nodes[0]]
            undone = {dispatch: combine, group_rows: ungroup_rows}[node.target]
            if order and order[0] == (undone, self.numbers.call(None, undone, node.args[1:], self._whole)):
                return found, order[1:]
        order = self._kept(node)
        number = self._call(node, order)
        self.made[node] = number
        return number, order

    def _plan(self, node: fx.Node) -> tuple[Any, int]:
        return node.target, self.numbers.call(None, node.target, node.args[1:], self._whole)

    def _kept(self, node: fx.Node) -> Order:
        """The order of the rows of all that ``node`` reads, if it treats every row alone."""
        if is_getitem(node):
            return self.of[node.all_input_nodes[0]][1]
        rule = self.rules.get(node.target) if node.op == "call_function" else None
        orders = {self.of[n][1] for n in tensor_inputs(node)} if rule is not None else set()
        if rule is None or rule.shape_arg is not None or len(orders) != 1 or orders == {()}:
            return ()
        factors = rule.factors(node)
        dims = (*factors.inputs, *factors.outputs)
        alone = all(len(each) > 1 and each[0] == factors.outputs[0][0] for each in dims)
        row = set(factors.outputs[0][0])
        return orders.pop() if alone and not any(row & set(dim) for each in dims for dim in each[1:]) else ()

    def _call(self, node: fx.Node, order: Order) -> int:
        place = node.op, self.program.stage.get(node), node in self.program.once
        return self.numbers.call(place, node.target, (node.args, node.kwargs), self._alone if order else self._whole)

    def _alone(self, node: fx.Node) -> int:
        return self.of[node][0]

    def _whole(self, node: fx.Node) -> int:
        """The number of a value with its rows in their old order."""
        number, order = self.of[node]
        for plan in reversed(order):
            number = self.numbers.number(number, plan)
        return number


# -- rows on their way to experts

Plan = tuple[fx.Node, fx.Node]  # the two parts of a plan
Move = tuple[str, AxisType, AxisType]  # an axis, and the types before and after


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


def splits(axes: Sequence[Axis], chosen: Sequence[Strategy]) -> list[Axis]:
    """The axes that split experts."""
    found = zip(axes, (one.inputs[2] for one in chosen), strict=True)
    return [axis for axis, kind in found if isinstance(kind, Shard) and kind.dim == 0]


def moved_there(axes: Sequence[Axis], chosen: Sequence[Strategy]) -> tuple[list[Move], list[Move]]:
    """The moves of rows between their arrival and the product, and of its result before that returns."""
    found = list[Move](), list[Move]()
    for axis, one in zip(axes, chosen, strict=True):
        if one.inside is not None:
            ends = (one.inputs[0], one.inside[0]), (one.inside[1], one.outputs[0])
            for side, (before, after) in zip(found, ends, strict=True):
                side += [(axis.name, before, after)] if before != after else []
    return found


def wrong_way(
    made: fx.Node, reads: Sequence[fx.Node], way: Sequence[tuple[Axis, int]], there: tuple[list[Move], list[Move]],
    split: Sequence[Axis], experts: int, transposed: bool, scaled: ScaledLayer | None = None,
) -> str:  # fmt: skip
    """What is wrong with rows that travel to a linear layer of so many experts, and back as ``made``; empty where
    nothing is. ``there``: see :func:`moved_there`; ``split``: the axes that split experts; ``scaled``: the layer, if it
    multiplies 8-bit numbers."""
    rows, ids = reads[:2]
    plans, counts = list[tuple[fx.Node, Plan]](), None
    hot: Any = None  # as the first plan has them
    for axis, ways in way:
        for planned in (n for n in ids.users if n.target is dispatch_plan and n.args[1:3] == (axis.name, axis.size)):
            plan = _parts(planned)
            routed = [_routed(x, planned, plan) for x in (ids, rows)] if plan else [None]
            same = planned.args[3:5] == (experts, ways) and (hot is None or planned.args[5] == hot)
            if routed[0] is not None and routed[1] is not None and same:
                assert plan is not None
                hot = planned.args[5]
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
    if made.target is not ungroup_rows or not isinstance(made.args[0], fx.Node):
        return f"{made.name} is no product of grouped rows"
    product, leaving = _unmoved(made.args[0])
    if leaving != there[1] or (scaled is None and product.target is not grouped_linear):
        return f"{made.name} is no product of grouped rows, moved by {there[1]}"
    try:
        grouped, ends = tensor_inputs(product)[:2] if scaled is None else scaled.read(product)
    except Wrong as wrong:
        return str(wrong)
    grouped, arriving = _unmoved(grouped)
    if arriving != there[0]:
        return f"{product.name} reads rows that {arriving} moved, and not {there[0]}"
    if grouped.target is not group_rows or grouped.args != (rows, *made.args[1:]) or ends is not made.args[2]:
        return f"{product.name} reads rows in another order than {made.name} gives back"
    planned, weights = origin(ends)[0], list(reads[2:])
    if planned.target is not group_plan or _parts(planned) != made.args[1:]:
        return f"{made.name} is not grouped by a plan"
    hot = hot or []
    if scaled is None:
        given, over = tensor_inputs(product)[2:], [axis.name for axis, _ in way]
        same = len(given) == len(weights) and product.args[4] is transposed
        if not same or not all(_behind(a, b, hot, split, over) for a, b in zip(given, weights, strict=True)):
            return f"{product.name} reads other weights"
    elif hot:
        return f"{product.name} knows no hot experts"
    mine, own, told, _ = planned.args
    named = experts, [axis.name for axis in split], [axis.size for axis in split], hot
    here = [n for n in ids.users if n.target is local_experts and n.args[1:] == named]
    if own != shape(weights[0])[0] + len(hot) or not (mine in here or (mine is ids and own == experts and not hot)):
        return f"{planned.name} is for other rows or experts"
    # what came with the rows counts those of no expert of this rank, too, where experts are split on another axis
    held = experts
    for axis, _ in way:
        held = math.ceil(held / axis.size)
    elsewhere = shape(weights[0])[0] != held
    if told is not None and (told is not counts or elsewhere):
        return f"{planned.name} takes the counts of other rows"
    return ""


def _behind(node: fx.Node, stored: fx.Node, hot: Sequence[int], split: Sequence[Axis], over: Sequence[str]) -> bool:
    """Whether ``node`` is what a rank has ``stored`` of its experts, and behind it what the ranks ``over`` some axes
    together have of ``hot`` ones."""
    if not hot:
        return node is stored
    parts: Any = node.args[0] if node.target is aten.cat.default and node.args[1:] == (0,) else ()
    if len(parts) != 2 or parts[0] is not stored:
        return False
    picked, summed = _unmoved(parts[1])
    wanted = stored, list(hot), shape(stored)[0], [axis.name for axis in split], [axis.size for axis in split]
    kinds = {(before, after) for _, before, after in summed}
    added_up = kinds == {(P, R if needs_grad(stored) else I)} and sorted(over) == sorted(axis for axis, *_ in summed)
    return added_up and picked.target is pick_experts and picked.args == wanted


def _unmoved(node: fx.Node) -> tuple[fx.Node, list[Move]]:
    """What moves between types carry to ``node``, and these, first one first."""
    found = list[Move]()
    while node.target is convert:
        axis, _, before, after = node.args[1:]
        found.append((str(axis), parse_type(str(before)), parse_type(str(after))))
        node = node.all_input_nodes[0]
    return node, found[::-1]


def _parts(planned: fx.Node) -> Plan | None:
    """The parts of a plan, each a node."""
    found = {int(n.args[1]): n for n in planned.users if is_getitem(n)}  # type: ignore[arg-type]
    return (found[0], found[1]) if len(found) == 2 else None


def _routed(x: fx.Node, planned: fx.Node, plan: Plan) -> fx.Node | None:
    return next((n for n in x.users if n.target is dispatch and n.args == (x, *planned.args[1:3], *plan)), None)
