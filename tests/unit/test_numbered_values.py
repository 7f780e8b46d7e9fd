"""checks.rewrites.numbered_values: values are numbered in order, from those that they are computed of."""

from __future__ import annotations

import operator
from types import SimpleNamespace
from typing import Any

from torch import fx

from quintnet_compiler.checks.rewrites.numbered_values import NumberedValues
from quintnet_compiler.ir.value_numbers import ValueNumbers


class Sums(NumberedValues):
    """Sums, in whichever order."""

    def _call(self, node: fx.Node) -> int:
        return self.numbers.number("sum", tuple(sorted(self.of[term] for term in node.all_input_nodes)))


def test_programs_that_compute_alike_have_the_same_numbers() -> None:
    numbers, results = ValueNumbers(), []
    for names in ("xy", "yx", "xz"):
        graph = fx.Graph()
        leaves = [graph.placeholder(name) for name in names]
        total = graph.call_function(operator.add, tuple(leaves))
        graph.output(graph.call_function(operator.add, (total, leaves[0])))
        program: Any = SimpleNamespace(graph=graph)
        values = Sums(program, numbers)
        assert len(values.of) == 4  # the output has none
        results.append(values.of[total])
    assert results[0] == results[1] != results[2]
