"""Check of values that wait in host memory: what comes back is what left, and nothing of it stays on the device."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import fx

from ....checks.failure import check_failure
from ....checks.rewrites.numbered_values import NumberedValues
from ....checks.rewrites.results import check_results
from ....compat.torch import OpOverload, schema_or_none
from ....core.annotations import facts, origin
from ....ir.program import DifferentiatedProgram
from ....ir.value_numbers import ValueNumbers
from ....ops.catalog import op_spec
from ....ops.copies import BACK

_fail = partial(check_failure, "offload check")


def check_offload(old: DifferentiatedProgram, new: DifferentiatedProgram) -> None:
    """Check that each value is computed by the same operators from the same values.

    A value that went to the host and came back is what it was; each that left in a forward comes back in the backward
    of the same stage, which reads nothing else of it.

    Raises:
        CompileError: QN209 with the first value that is another one, or is kept after all.
    """
    numbers = ValueNumbers()
    _check_calls(NumberedCopies(old, numbers), NumberedCopies(new, numbers))
    names = {node.name for node in old.graph.nodes}
    for node in new.graph.nodes:
        if (back := BACK.get(node.target)) is not None:
            _check_pair(new, node, back)
        if node.op == "call_function" and not node.users and node.name not in names:
            raise _fail(f"nothing reads {node.name}", node)
    left = {(new.stage[n], n.all_input_nodes[0]) for n in new.graph.nodes if op_spec(n).copies_away}
    for node in new.graph.nodes:
        if node.op == "call_function" and facts(node).phase == "backward":
            for source in node.all_input_nodes:
                if kept := _kept(new, new.stage[node], source, left):
                    raise _fail(f"{node.name} reads {source.name} of the forward, though {kept.name} has left", node)


def _check_calls(old: NumberedCopies, new: NumberedCopies) -> None:
    check_results(old.program, new.program, old.of, new.of, _fail)
    for call, node in new.calls.items():
        if call not in old.calls:
            raise _fail(f"{node.name} is another call than any there was", node)
    if missing := old.calls.keys() - new.calls.keys():
        raise _fail(f"{old.calls[min(missing, key=str)].name} is called no more", None)


def _check_pair(program: DifferentiatedProgram, node: fx.Node, back: OpOverload) -> None:
    readers = list(node.users)
    if len(readers) != 1 or readers[0].target is not back:
        raise _fail(f"{node.name} does not come back once", node)
    places = [(program.stage.get(n), facts(n).phase, n in program.once) for n in (node, *readers)]
    stage = program.stage.get(node)
    if stage is None or places != [(stage, "forward", False), (stage, "backward", False)]:
        raise _fail(f"{node.name} does not go from a forward to the backward of its stage", node)


def _kept(program: DifferentiatedProgram, stage: int, node: fx.Node, left: set[tuple[int, fx.Node]]) -> fx.Node | None:
    """Return the value that has left a stage and in whose memory a value of its forward may lie."""
    while facts(node).phase == "forward":
        if (stage, node) in left:
            return node
        call = origin(node)[0]
        views = any(r.alias_info is not None for r in getattr(schema_or_none(call.target), "returns", ()))
        if program.stage.get(node) != stage or not (views and call.all_input_nodes):
            return None
        node = call.all_input_nodes[0]
    return None


@dataclass
class NumberedCopies(NumberedValues):
    """Numbers of values, a copy's that of what it is a copy of.

    Attributes:
        calls: the numbers of all but copies, with the stage in which each runs (a view may run once more), and a node
            that makes it.
    """

    calls: dict[tuple[int, int | None, bool], fx.Node] = field(default_factory=dict)

    def _call(self, node: fx.Node) -> int:
        args: Any = node.args
        if op_spec(node).is_copy:
            return self.of[args[0]]
        number = self.numbers.call(None, node.target, (args, node.kwargs), self.of.__getitem__)
        self.calls.setdefault((number, self.program.stage.get(node), node in self.program.once), node)
        return number
