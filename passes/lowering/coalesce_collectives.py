"""DifferentiatedProgram -> DifferentiatedProgram: slices of a block's state travel together."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

from torch import fx

from ...compat.torch import OpOverload, operator_name
from ...core.annotations import annotate, facts, leaf, num_bytes, value
from ...ir.program import BUCKET_MIB, DifferentiatedProgram
from ...ir.repeated_blocks import block_of
from ...ops.collectives import (
    all_gather,
    gather_state,
    gather_states,
    gather_together,
    reduce_scatter,
    scatter_together,
)
from ...ops.scaled_products import parameter_of


@dataclass(frozen=True)
class CoalesceCollectives:
    """One collective for the gathers of a block's parameters, before the first of them is used, and one for the
    scatters of its gradients, when the last of them is there. Of what is gathered at the start of a step, one for
    every ``bucket_mib`` MiB.

    Before: %w = all_gather(%p1, dp);  %y = linear(%x, %w);  %b = all_gather(%p2, dp)
    After:  %all = gather_together([%p1, %p2], dp);  %w = %all[0];  %y = linear(%x, %w);  %b = %all[1]
    Ensures: the same values, in fewer messages; a block's parameters are whole at once. What lies between blocks
    travels with its neighbours there.
    """

    bucket_mib: float = BUCKET_MIB

    def __call__(self, program: DifferentiatedProgram, /) -> DifferentiatedProgram:
        gathers, scatters = _groups(program)
        gathers += _at_start(program, self.bucket_mib * 2**20)
        first = {node: members for members in gathers for node in members}
        last = {members[-1]: members for members in scatters}
        joined = {node for members in scatters for node in members}
        graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
        stage: dict[fx.Node, int] = {}
        once: set[fx.Node] = set()

        def emit(node: fx.Node) -> None:
            new[node] = graph.node_copy(node, lambda n: new[n])
            if node in program.stage:
                stage[new[node]] = program.stage[node]

        def ready(node: fx.Node) -> None:
            """Of a parameter: the copy that operators read, and its 8-bit numbers with what these are computed from,
            stand right before its own gather."""
            todo = [node]
            while todo:
                here = todo[-1]
                missing = [n for n in here.all_input_nodes if n not in new]
                if here in new or not missing:
                    todo.pop()
                    gather_or_emit(here)
                else:
                    todo += missing

        def gather_or_emit(node: fx.Node) -> None:
            if node in new:
                return
            if node not in first:
                return emit(node)
            together(first[node], gather_states if node.target is gather_state else gather_together)

        def together(members: Sequence[fx.Node], target: OpOverload) -> None:
            for source in (node.all_input_nodes[0] for node in members):
                ready(source)
            _, axis, size = members[0].args[:3]
            dims, parts = ([node.args[place] for node in members] for place in (3, 4))
            given = [new[node.args[0]] for node in members]  # type: ignore[index]
            name = operator_name(target)
            made = graph.create_node("call_function", target, (given, axis, size, dims, parts), name=name)
            once.update({made} if members[0] in program.once else ())
            annotate(made, replace(facts(members[0]), value=tuple(value(node) for node in members)))
            stage[made] = program.stage[members[0]]
            for index, node in enumerate(members):
                new[node] = graph.create_node("call_function", operator.getitem, (made, index), name=node.name)
                annotate(new[node], facts(node))
                stage[new[node]] = program.stage[node]

        for node in program.graph.nodes:
            if node in last:
                together(last[node], scatter_together)
            elif node.op == "output":
                graph.output(fx.map_arg(node.args[0], lambda n: new[n]))
            elif node not in joined:
                gather_or_emit(node)
        graph.lint()
        moved = program.moved(graph, new, stage)
        return replace(moved, once=moved.once | once)


def _groups(program: DifferentiatedProgram) -> tuple[list[list[fx.Node]], list[list[fx.Node]]]:
    """Gathers of parameters, and scatters of gradients that nothing else reads, in twos or more."""
    gathers: dict[Hashable, list[fx.Node]] = defaultdict(list)
    scatters: dict[Hashable, list[fx.Node]] = defaultdict(list)
    settled, run, before = set(program.gradients.values()), 0, None
    for node in program.graph.nodes:
        if node.op != "call_function" or node not in program.stage:
            continue
        block = block_of(node)
        run, before = run + (block != before), block
        if node in program.once or node.target not in (all_gather, reduce_scatter):
            continue
        place = block or run
        key = program.stage[node], facts(node).phase, node.args[1], value(node).dtype, place
        if node.target is all_gather and _stored(node.all_input_nodes[0]):
            gathers[key].append(node)
        elif node in settled and all(user.op == "output" for user in node.users):
            scatters[key].append(node)
    return [m for m in gathers.values() if len(m) > 1], [m for m in scatters.values() if len(m) > 1]


def _at_start(program: DifferentiatedProgram, limit: float) -> list[list[fx.Node]]:
    """Gathers of parameters at the start of a step, of ``limit`` bytes or what comes to that first."""
    groups: dict[Hashable, list[list[fx.Node]]] = defaultdict(list)
    sizes: dict[Hashable, float] = {}
    for node in program.graph.nodes:
        if node.target is gather_state and node in program.once and _stored(node.all_input_nodes[0]):
            key = program.stage[node], node.args[1], value(node).dtype
            if not groups[key] or sizes[key] >= limit:
                groups[key].append([])
                sizes[key] = 0.0
            groups[key][-1].append(node)
            sizes[key] += num_bytes(value(node))
    return [members for found in groups.values() for members in found]


def _stored(node: fx.Node) -> bool:
    return leaf(node) is not None or parameter_of(node) is not None
