"""DifferentiatedProgram -> DifferentiatedProgram: all-reduces overwrite their input, where nothing else reads it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from ...core.annotations import facts, memory_of
from ...ir.program import DifferentiatedProgram
from ...ops.catalog import op_spec
from ...ops.collectives import STARTS, all_reduce, all_reduce_

aten = torch.ops.aten
IN_PLACE = {all_reduce: all_reduce_, STARTS[all_reduce]: STARTS[all_reduce_]}


@dataclass(frozen=True)
class SumInPlace:
    """Let each all-reduce overwrite its input, if nothing else reads that.

    Before: %y = mm(%x, %w);  %z = reshape(%y, ...);  %s = all_reduce(%z, tp)
    After:  %y = mm(%x, %w);  %z = reshape(%y, ...);  %s = all_reduce_(%z, tp)
    Ensures: the input is new memory of the same function, and only the all-reduce reads it: it is not saved for the
    backward, sent, returned, or a view of another value. Otherwise collectives that sum in place need a copy first, a
    pass over the activation.
    """

    def __call__(self, program: DifferentiatedProgram, /) -> DifferentiatedProgram:
        in_place = {node for node in program.graph.nodes if node.target in IN_PLACE and _free(program, node)}
        if not in_place:
            return program
        graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in program.graph.nodes:
            new[node] = graph.node_copy(node, lambda n: new[n])
            if node in in_place:
                new[node].target = IN_PLACE[node.target]
        graph.lint()
        return program.moved(graph, new, {new[node]: stage for node, stage in program.stage.items()})


def _free(program: DifferentiatedProgram, node: fx.Node) -> bool:
    """Return whether the memory that ``node`` reads is new, and nothing else reads it."""
    view = node.all_input_nodes[0]
    root = memory_of(view)
    if not op_spec(root).new_memory or not _together(program, root, node):
        return False
    if op_spec(root).adds and len(root.all_input_nodes) < 2:
        return False  # a sum with the number 0 may return its input
    while len(view.users) == 1 and view is not root:
        view = view.all_input_nodes[0]
    return view is root and len(root.users) == 1


def _together(program: DifferentiatedProgram, a: fx.Node, b: fx.Node) -> bool:
    """Return whether one function computes both."""
    same = program.stage.get(a) == program.stage.get(b) and (a in program.once) == (b in program.once)
    return same and facts(a).phase == facts(b).phase
