"""DifferentiatedProgram -> DifferentiatedProgram: what a step begins with is waited for where it is first read."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

import torch
from torch import fx

from ...core.annotations import annotate, facts, value
from ...ir.program import DifferentiatedProgram
from ...ops.collectives import gather_early, gather_states
from ...ops.rank_local import arrived

aten = torch.ops.aten


@dataclass(frozen=True)
class GatherEarly:
    """Parameters that are gathered at the start of a step are on their way while the first forward computes.

    Before: once: %all = gather_states([%p, %q], dp);  %w = %all[0];  forward: %y = linear(%x, %w)
    After:  once: %all = gather_early([%p, %q], dp);  %w = %all[0];  forward: %v = arrived(%w);  %y = linear(%x, %v)
    Ensures: a stage reads such a parameter through ``arrived`` alone, which waits for the message in the first
    microbatch; messages start in the order of their first use. What takes the padding off a parameter that does not
    divide, a view, stands behind that. What else runs at the start of a step reads no such parameter: else its message
    is waited for there.
    """

    def __call__(self, program: DifferentiatedProgram, /) -> DifferentiatedProgram:
        early = [n for n in program.graph.nodes if n.target is gather_states and _read_later(program, n)]
        if not early:
            return program
        parts = {part for node in early for part in node.users}
        views = {user for part in parts for user in part.users if user in program.once}
        graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
        stage, there = dict[fx.Node, int](), dict[fx.Node, fx.Node]()

        def read(node: fx.Node) -> fx.Node:
            return there.get(node, new[node])

        def arrive(part: fx.Node, user: fx.Node) -> None:
            made = graph.create_node("call_function", arrived, (new[part],), name=f"{part.name}_arrived")
            annotate(made, replace(facts(part), phase=facts(user).phase))
            there[part], stage[made] = made, program.stage[part]

        def ready(source: fx.Node, user: fx.Node) -> None:
            if source in views and source not in new:
                ready(source.all_input_nodes[0], user)
                new[source] = graph.node_copy(source, read)
                annotate(new[source], replace(facts(source), phase=facts(user).phase))
                stage[new[source]] = program.stage[source]
            elif source in parts and source not in there:
                arrive(source, user)

        for node in program.graph.nodes:
            if node in views:
                continue
            for source in node.all_input_nodes:
                ready(source, node)
            new[node] = graph.node_copy(node, read)
            if node in program.stage:
                stage[new[node]] = program.stage[node]
            if node in early:
                new[node].target = gather_early
        graph.lint()
        made = program.moved(graph, new, stage)
        return replace(made, once=made.once - {new[view] for view in views})


def _read_later(program: DifferentiatedProgram, node: fx.Node) -> bool:
    """Whether all that a message brings is read by the functions of microbatches, its own stage's first."""
    picks = list(node.users)
    if node not in program.once or any(pick.target is not operator.getitem for pick in picks):
        return False
    users = [_readers(program, pick) for pick in picks]
    return all(user.op == "call_function" and user not in program.once for found in users for user in found) and all(
        facts(min(found)).phase == "forward" and value(pick).numel()
        for pick, found in zip(picks, users, strict=True)
        if found
    )


def _readers(program: DifferentiatedProgram, part: fx.Node) -> list[fx.Node]:
    """Who reads a parameter, of which a view may be taken first."""
    views = [user for user in part.users if user in program.once and user.target is aten.slice.Tensor]
    return [reader for one in (part, *views) for reader in one.users if reader not in views]
