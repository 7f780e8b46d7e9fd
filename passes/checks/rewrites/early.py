"""Check of parameters that are under way when a step begins: nothing reads them before they are there."""

from __future__ import annotations

import operator
from functools import partial

from torch import fx

from ....core.annotations import facts
from ....ir.program import DifferentiatedProgram
from ....ops.collectives import gather_early
from ....ops.rank_local import arrived
from ..failure import check_failure

_fail = partial(check_failure, "early gathers")


def check_early(program: DifferentiatedProgram) -> None:
    """Raises: CompileError QN209 with what reads a parameter that may still be on its way, or waits for nothing."""
    for node in program.graph.nodes:
        if node.target is gather_early:
            if node not in program.once:
                raise _fail(f"{node.name} starts in each microbatch", node)
            for pick in node.users:
                for user in pick.users if pick.target is operator.getitem else (pick,):
                    if user.target is not arrived:
                        raise _fail(f"{user.name} reads {pick.name} while it is under way", node)
        if node.target is arrived:
            (pick,) = node.all_input_nodes
            made = pick.args[0] if pick.target is operator.getitem else None
            if not isinstance(made, fx.Node) or made.target is not gather_early:
                raise _fail(f"{node.name} waits for {pick.name}, which nothing started", node)
            if node in program.once or program.stage.get(node) != program.stage.get(made):
                raise _fail(f"{node.name} waits in another function than those that follow", node)
            if facts(node).phase != "forward":
                raise _fail(f"{node.name} waits in the backward alone", node)
