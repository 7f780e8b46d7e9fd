"""Check of gradients that are computed in the forward: they are those that the backward computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import fx

from ....checks.failure import check_failure
from ....checks.rewrites.numbered_values import NumberedValues
from ....checks.rewrites.results import check_results
from ....core.annotations import facts
from ....ir.program import DifferentiatedProgram
from ....ir.value_numbers import ValueNumbers
from ....ops.catalog import op_spec

_fail = partial(check_failure, "early gradients check")


def check_early_loss_gradients(old: DifferentiatedProgram, new: DifferentiatedProgram) -> None:
    """Check that each value is computed by the same operators from the same values, in whichever order terms are added.

    The forward reads nothing of the backward.

    Raises:
        CompileError: QN209 with the first value that is another one.
    """
    numbers = ValueNumbers()
    old_values, new_values = _Numbered(old, numbers), _Numbered(new, numbers)
    check_results(old, new, old_values.of, new_values.of, _fail)
    if old_values.calls != new_values.calls:
        raise _fail("other calls are made, or elsewhere", None)
    for node in new.graph.nodes:
        if node.op == "call_function" and facts(node).phase == "forward":
            late = [n for n in node.all_input_nodes if n.op == "call_function" and facts(n).phase == "backward"]
            if late:
                raise _fail(f"{node.name} reads {late[0].name}, which the backward makes", node)
    if any(facts(node).phase != "backward" for node in new.gradients.values() if node.op == "call_function"):
        raise _fail("a gradient is handed over in the forward", None)


@dataclass
class _Numbered(NumberedValues):
    """Numbers of values. ``calls``: those of calls but sums and views, with where they run."""

    terms: dict[int, tuple[int, ...]] = field(default_factory=dict)
    calls: set[tuple[int, int | None, bool]] = field(default_factory=set)

    def _call(self, node: fx.Node) -> int:
        args: Any = node.args
        if op_spec(node).aliases:
            return self.of[args[0]]
        if op_spec(node).adds and not node.kwargs and all(isinstance(x, fx.Node) for x in args):
            added = tuple(sorted(term for x in args for term in self.terms.get(self.of[x], (self.of[x],))))
            total = self.numbers.number("sum", added)
            self.terms[total] = added
            return total
        number = self.numbers.call(None, node.target, (args, node.kwargs), self.of.__getitem__)
        self.calls.add((number, self.program.stage.get(node), node in self.program.once))
        return number
