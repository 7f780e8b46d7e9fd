"""Check of a reordered graph: every node does what it did before, and whatever was started is waited for."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from torch import fx

from ...ir.program import DifferentiatedProgram
from ...ops.catalog import op_spec
from ...ops.collectives import STARTS
from ..failure import check_failure

_fail = partial(check_failure, "overlap check")
BEGINS = frozenset(STARTS.values())


def check_overlap(original: DifferentiatedProgram, reordered: DifferentiatedProgram) -> None:
    """Raise CompileError QN209 with what is another call than in ``original``, or not paired."""
    nodes = {n.name: n for n in reordered.graph.nodes}
    check_pairs(reordered.graph.nodes)
    starts = sum(op_spec(n).under_way for n in reordered.graph.nodes)
    if len(nodes) != len(original.graph.nodes) + starts:
        raise _fail("there are nodes too many or too few", None)
    for old in original.graph.nodes:
        new = nodes.get(old.name)
        call = new.args[0] if new is not None and op_spec(new).waits else new
        target = STARTS.get(old.target, old.target) if call is not new else old.target
        if new is None or not isinstance(call, fx.Node) or call.target != target:
            raise _fail(f"{old.name} is another call than it was", old)
        if repr((call.args, call.kwargs)) != repr((old.args, old.kwargs)):
            raise _fail(f"{old.name} reads something else than it did", old)
        if original.stage.get(old) != reordered.stage.get(new) or original.stage.get(old) != reordered.stage.get(call):
            raise _fail(f"{old.name} is in another stage than it was", old)


def check_pairs(nodes: Iterable[fx.Node]) -> None:
    """Check a graph, or one generated function: each start is read by one wait alone, and that by nothing else.

    Raises:
        CompileError: QN209.
    """
    for node in nodes:
        users = list(node.users)
        if op_spec(node).under_way and (len(users) != 1 or not op_spec(users[0]).waits):
            readers = ", ".join(user.name for user in users) or "nobody"
            raise _fail(f"{node.name} is under way, and {readers} reads it instead of one wait", node)
        if op_spec(node).waits:
            begun = node.all_input_nodes[-1]
            if not op_spec(begun).under_way:
                raise _fail(f"{node.name} waits for {begun.name}, which nothing started", node)
