"""Check of expert layers that pass rows on: with some dispatches and combines removed, every value is what it was.

Values are numbered by what makes them. A ``combine`` is not numbered where it stands, but where its rows are read in
their old order: operators that treat every row alone may come first, and a ``dispatch`` by the same plan cancels it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import fx

from ...core.annotations import is_getitem, tensor_inputs
from ...ir.program import LocalProgram
from ...ir.value_numbers import ValueNumbers
from ...ops.catalog import op_spec
from ...ops.rules.notation import Rule
from ..failure import check_failure

Order = tuple[tuple[Any, int], ...]  # the calls that would restore the order of rows, the last one first
Number = tuple[int, Order]


def check_token_dispatch(original: LocalProgram, rewritten: LocalProgram, rules: Mapping[Any, Rule]) -> None:
    """Check that both programs compute the same values.

    Raises:
        CompileError: QN209 with the first value that only one of them computes.
    """
    numbers = ValueNumbers()
    old, new = _OrderedRows(original, rules, numbers), _OrderedRows(rewritten, rules, numbers)
    _check_subset(old, new, "is lost")
    _check_subset(new, old, "was not there")


def _check_subset(rows: _OrderedRows, others: _OrderedRows, message: str) -> None:
    remaining = Counter[int | None](others.numbered.values())
    for node in rows.program.graph.nodes:
        number = rows.numbered.get(node)
        remaining[number] -= 1
        if number is not None and remaining[number] < 0:
            raise check_failure("token dispatch", f"{node.name} {message}", node)


class _OrderedRows:
    """The numbers of a program's values, and the order of their rows.

    Attributes:
        of: the number of each node, with the order of its rows.
        numbered: the number of each node that does more than order rows; equal values have equal numbers.
    """

    def __init__(self, program: LocalProgram, rules: Mapping[Any, Rule], numbers: ValueNumbers) -> None:
        """Number the values of ``program``."""
        self.program, self.rules, self.numbers = program, rules, numbers
        self.of: dict[fx.Node, Number] = {}
        self.numbered: dict[fx.Node, int] = {}
        for node in program.graph.nodes:
            self.of[node] = self._number(node)

    def _number(self, node: fx.Node) -> Number:
        spec = op_spec(node)
        if spec.restores_rows:
            number, order = self.of[node.all_input_nodes[0]]
            return number, (self._reordering(node.target, node), *order)
        if spec.reorders_rows:
            number, order = self.of[node.all_input_nodes[0]]
            if order and order[0] == self._reordering(spec.transpose, node):
                return number, order[1:]
        order = self._order_of_inputs(node)
        number = self._call(node, order)
        self.numbered[node] = number
        return number, order

    def _reordering(self, target: Any, node: fx.Node) -> tuple[Any, int]:
        return target, self.numbers.call(None, target, node.args[1:], self._in_old_order)

    def _order_of_inputs(self, node: fx.Node) -> Order:
        """Return the order of the rows of all inputs, if ``node`` treats every row alone; else none."""
        if is_getitem(node):
            return self.of[node.all_input_nodes[0]][1]
        rule = self.rules.get(node.target) if node.op == "call_function" else None
        if rule is None or rule.shape_arg is not None:
            return ()
        orders = {self.of[n][1] for n in tensor_inputs(node)}
        return orders.pop() if len(orders) == 1 and orders != {()} and _treats_rows_alone(rule, node) else ()

    def _call(self, node: fx.Node, order: Order) -> int:
        place = node.op, self.program.stage.get(node), node in self.program.once
        number_of = self._as_it_is if order else self._in_old_order
        return self.numbers.call(place, node.target, (node.args, node.kwargs), number_of)

    def _as_it_is(self, node: fx.Node) -> int:
        return self.of[node][0]

    def _in_old_order(self, node: fx.Node) -> int:
        """Return the number of a value with its rows in their old order."""
        number, order = self.of[node]
        for reordering in reversed(order):
            number = self.numbers.number(number, reordering)
        return number


def _treats_rows_alone(rule: Rule, node: fx.Node) -> bool:
    """Return whether the first dim of all operands is the same factor, which no other dim has."""
    factors = rule.factors(node)
    tensors = (*factors.inputs, *factors.outputs)
    row = factors.outputs[0][0]
    if any(len(dims) < 2 or dims[0] != row for dims in tensors):
        return False
    return not any(set(row) & set(dim) for dims in tensors for dim in dims[1:])
