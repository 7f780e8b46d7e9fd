"""DifferentiatedProgram -> DifferentiatedProgram: what a step begins with is waited for where it is first read."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

from torch import fx

from ...core.annotations import annotate, facts, value
from ...ir.program import DifferentiatedProgram
from ...ops.collectives import gather_early, gather_states
from ...ops.rank_local import arrived


@dataclass(frozen=True)
class GatherEarly:
    """Parameters that are gathered at the start of a step are on their way while the first forward computes.

    Before: once: %all = gather_states([%p, %q], dp);  %w = %all[0];  forward: %y = linear(%x, %w)
    After:  once: %all = gather_early([%p, %q], dp);  %w = %all[0];  forward: %v = arrived(%w);  %y = linear(%x, %v)
    Ensures: a stage reads such a parameter through ``arrived`` alone, which waits for the message in the first
    microbatch; messages start in the order of their first use. What else runs at the start of a step reads no such
    parameter: else its message is waited for there.
    """

    def __call__(self, program: DifferentiatedProgram, /) -> DifferentiatedProgram:
        early = [n for n in program.graph.nodes if n.target is gather_states and _read_later(program, n)]
        parts = {part for node in early for part in node.users}
        graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
        stage, there = dict[fx.Node, int](), dict[fx.Node, fx.Node]()

        def read(node: fx.Node) -> fx.Node:
            return there.get(node, new[node])

        def arrive(part: fx.Node, user: fx.Node) -> None:
            made = graph.create_node("call_function", arrived, (new[part],), name=f"{part.name}_arrived")
            annotate(made, replace(facts(part), phase=facts(user).phase))
            there[part], stage[made] = made, program.stage[part]

        for node in program.graph.nodes:
            for part in node.all_input_nodes:
                if part in parts and part not in there:
                    arrive(part, node)
            new[node] = graph.node_copy(node, read)
            if node in program.stage:
                stage[new[node]] = program.stage[node]
            if node in early:
                new[node].target = gather_early
        graph.lint()
        return program.moved(graph, new, stage) if early else program


def _read_later(program: DifferentiatedProgram, node: fx.Node) -> bool:
    """Whether all that a message brings is read by the functions of microbatches, its own stage's first."""
    picks = list(node.users)
    users = [user for pick in picks for user in pick.users]
    if node not in program.once or any(pick.target is not operator.getitem for pick in picks):
        return False
    return all(user.op == "call_function" and user not in program.once for user in users) and all(
        facts(min(pick.users)).phase == "forward" and value(pick).numel() for pick in picks if pick.users
    )
