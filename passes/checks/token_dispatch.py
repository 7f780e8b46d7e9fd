"""Check of tokens that stay where they are: dispatched and combined as before, every value is what it was.

Values are numbered by what makes them. A ``combine`` is not numbered where it stands, but where its rows are read in
their old order: operators that treat every row alone may come first, and a ``dispatch`` by the same plan cancels it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import fx

from ...core.annotations import facts, is_getitem, tensor_inputs
from ...core.errors import REPORT, CompileError
from ...ir.program import LocalProgram
from ...ir.value_numbers import ValueNumbers
from ...ops.collectives import combine, dispatch
from ...ops.grouped_rows import group_rows, ungroup_rows
from ...ops.rules.notation import Rule

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
