"""Check of parameters whose all-gather runs when a step begins: nothing reads them before it has ended."""

from __future__ import annotations

from functools import partial

from torch import fx

from ...core.annotations import facts, is_getitem
from ...ir.program import DifferentiatedProgram
from ...ops.collectives import gather_early
from ...ops.rank_local import arrived
from ..failure import check_failure

_fail = partial(check_failure, "early gathers")


def check_early(program: DifferentiatedProgram) -> None:
    """Check each early all-gather, and each wait for one.

    Raises:
        CompileError: QN209 with what reads a parameter that may still be on its way, or waits for nothing.
    """
    for node in program.graph.nodes:
        if node.target is gather_early:
            _check_start(program, node)
        elif node.target is arrived:
            _check_wait(program, node)


def _check_start(program: DifferentiatedProgram, node: fx.Node) -> None:
    if node not in program.once:
        raise _fail(f"{node.name} starts in each microbatch", node)
    for result in node.users:
        for user in result.users if is_getitem(result) else (result,):
            if user.target is not arrived:
                raise _fail(f"{user.name} reads {result.name} while it is under way", node)


def _check_wait(program: DifferentiatedProgram, node: fx.Node) -> None:
    (result,) = node.all_input_nodes
    start = result.args[0] if is_getitem(result) else None
    if not isinstance(start, fx.Node) or start.target is not gather_early:
        raise _fail(f"{node.name} waits for {result.name}, which nothing started", node)
    if node in program.once or program.stage.get(node) != program.stage.get(start):
        raise _fail(f"{node.name} waits in another function than those that read {result.name}", node)
    if facts(node).phase != "forward":
        raise _fail(f"{node.name} waits in the backward alone", node)
