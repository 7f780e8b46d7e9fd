"""Check of tokens that stay where they are: dispatched and combined as before, every value is what it was.

Values are numbered by what makes them. A ``combine`` is not numbered where it stands, but where its rows are read in
their old order: operators that treat every row alone may come first, and a ``dispatch`` by the same plan cancels it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from ...core.annotations import facts, is_getitem, tensor_inputs
from ...core.errors import REPORT, CompileError
from ...ir.program import LocalProgram
from ...ops.collectives import combine, dispatch
from ...ops.grouped_rows import group_rows, ungroup_rows
from ...ops.rules.notation import Rule

Order = tuple[tuple[Any, str], ...]  # how the rows of a value are ordered: what would bring them back, last one first
Number = tuple[int, Order]


@dataclass(frozen=True)
class NumberRead:
    """The number of a value that is read, among an operator's arguments."""

    number: int


def check_token_dispatch(before: LocalProgram, after: LocalProgram, rules: Mapping[Any, Rule]) -> None:
    """Raises: CompileError QN209 with the first value that is another than ``before``."""
    table: dict[Any, int] = {}
    old, new = _OrderedRows(before, rules, table), _OrderedRows(after, rules, table)
    for program, mine, others, what in ((before, old, new, "is lost"), (after, new, old, "was not there")):
        left = Counter[int | None](others.made.values())
        for node in program.graph.nodes:
            number = mine.made.get(node)
            left[number] -= 1
            if number is not None and left[number] < 0:
                raise CompileError("QN209", f"token dispatch: {node.name} {what}", where=facts(node).where, fix=REPORT)


class _OrderedRows:
    """``made``: the number of every value but those that only order rows; equal ones have equal numbers."""

    def __init__(self, program: LocalProgram, rules: Mapping[Any, Rule], table: dict[Any, int]) -> None:
        self.program, self.rules, self.table = program, rules, table
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
            if order and order[0] == (undone, self._plan(node)[1]):
                return found, order[1:]
        order = self._kept(node)
        number = self._call(node, order)
        self.made[node] = number
        return number, order

    def _plan(self, node: fx.Node) -> tuple[Any, str]:
        return node.target, _shown(node.args[1:], self._whole)

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
        given = _shown((node.args, dict(node.kwargs)), self._alone if order else self._whole)
        return self._numbered((node.op, node.target, given, self.program.stage.get(node), node in self.program.once))

    def _alone(self, node: fx.Node) -> int:
        return self.of[node][0]

    def _whole(self, node: fx.Node) -> int:
        """The number of a value with its rows in their old order."""
        number, order = self.of[node]
        for plan in reversed(order):
            number = self._numbered((number, plan))
        return number

    def _numbered(self, key: Any) -> int:
        return self.table.setdefault(key, len(self.table))


def _shown(given: Any, number: Callable[[fx.Node], int]) -> str:
    """Arguments as text, with the number of each value that they read."""
    return repr(fx.map_arg(given, lambda n: NumberRead(number(n))))  # type: ignore[arg-type,return-value]
