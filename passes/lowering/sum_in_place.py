"""DifferentiatedProgram -> DifferentiatedProgram: sums over ranks take the memory of their terms, where it is free."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ...core.annotations import facts, memory_of
from ...ir.program import DifferentiatedProgram
from ...ops.collectives import STARTS, all_reduce, all_reduce_
from ...ops.rank_local import embedding_rows, embedding_rows_backward

aten = torch.ops.aten
IN_PLACE = {all_reduce: all_reduce_, STARTS[all_reduce]: STARTS[all_reduce_]}
# Their results are memory of their own whatever runs them. Others may hand out an input where they have nothing to do
# (a slice of everything), or have a compiler that does.
_FRESH = frozenset(
    {
        aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.linear.default,
        aten.add.Tensor, aten.sum.dim_IntList, aten.sum.default, aten.embedding.default,
        aten.embedding_dense_backward.default, embedding_rows, embedding_rows_backward,
    }
)  # fmt: skip


@dataclass(frozen=True)
class SumInPlace:
    """Each all-reduce whose input nobody else has overwrites it.

    Before: %y = mm(%x, %w);  %z = reshape(%y, ...);  %s = all_reduce(%z, tp)
    After:  %y = mm(%x, %w);  %z = reshape(%y, ...);  %s = all_reduce_(%z, tp)
    Ensures: the input is new memory of the same function, and read by the all-reduce alone: nothing that is kept for
    the backward, sent, returned, or a view of something else. Collectives that add up in place need a copy otherwise:
    a pass over the activation.
    """

    def __call__(self, program: DifferentiatedProgram, /) -> DifferentiatedProgram:
        found = {node for node in program.graph.nodes if node.target in IN_PLACE and _free(program, node)}
        if not found:
            return program
        graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in program.graph.nodes:
            new[node] = graph.node_copy(node, lambda n: new[n])
            if node in found:
                new[node].target = IN_PLACE[node.target]
        graph.lint()
        return program.moved(graph, new, {new[node]: stage for node, stage in program.stage.items()})


def _free(program: DifferentiatedProgram, node: fx.Node) -> bool:
    """Whether the memory of what ``node`` reads is new, and nobody's after it."""
    here = node.all_input_nodes[0]
    root = memory_of(here)
    if root.target not in _FRESH or not _together(program, root, node):
        return False
    if root.target is aten.add.Tensor and len(root.all_input_nodes) < 2:
        return False  # of a number: nothing, if that is 0
    while len(here.users) == 1 and here is not root:
        here = here.all_input_nodes[0]
    return here is root and len(root.users) == 1


def _together(program: DifferentiatedProgram, a: fx.Node, b: fx.Node) -> bool:
    """Whether one function runs both."""
    same = program.stage.get(a) == program.stage.get(b) and (a in program.once) == (b in program.once)
    return same and facts(a).phase == facts(b).phase
