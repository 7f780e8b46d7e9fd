"""DifferentiatedProgram -> DifferentiatedProgram: gathers at the start of a step overlap with the first forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from ...core.annotations import annotate, facts, is_getitem, value
from ...ir.program import DifferentiatedProgram
from ...ops.catalog import op_spec
from ...ops.collectives import gather_early, gather_states
from ...ops.rank_local import arrived

aten = torch.ops.aten


@dataclass(frozen=True)
class GatherEarly:
    """Gather parameters at the start of a step while the first forward computes.

    Before: once: %all = gather_states([%p, %q], dp);  %w = %all[0];  forward: %y = linear(%x, %w)
    After:  once: %all = gather_early([%p, %q], dp);  %w = %all[0];  forward: %v = arrived(%w);  %y = linear(%x, %v)
    Ensures: a stage reads such a parameter through ``arrived`` alone, which waits for the message in the first
    microbatch; messages start in the order of their first use. The view that removes the padding of a parameter comes
    after ``arrived``. No other node at the start of a step reads such a parameter; if one does, its gather stays.
    """

    def __call__(self, program: DifferentiatedProgram, /) -> DifferentiatedProgram:
        early = [n for n in program.graph.nodes if n.target is gather_states and _read_in_microbatches(program, n)]
        return _Early(program, early).overlapped() if early else program


class _Early:
    """A copy of a program whose gathers ``early`` overlap with the first forward.

    Attributes:
        parts: the parameters that they gather.
        views: views of these, which move into the functions of microbatches.
        new: the copy of each node.
        arrived: for each parameter, the node that waits for it.
    """

    def __init__(self, program: DifferentiatedProgram, early: Sequence[fx.Node]) -> None:
        self.program, self.early = program, early
        self.parts = {part for node in early for part in node.users}
        self.views = {user for part in self.parts for user in part.users if user in program.once}
        self.graph, self.new = fx.Graph(), dict[fx.Node, fx.Node]()
        self.stage, self.arrived = dict[fx.Node, int](), dict[fx.Node, fx.Node]()

    def overlapped(self) -> DifferentiatedProgram:
        for node in self.program.graph.nodes:
            if node in self.views:
                continue
            for source in node.all_input_nodes:
                self._await(source, node)
            self.new[node] = self.graph.node_copy(node, self._source)
            if node in self.program.stage:
                self.stage[self.new[node]] = self.program.stage[node]
            if node in self.early:
                self.new[node].target = gather_early
        self.graph.lint()
        moved = self.program.moved(self.graph, self.new, self.stage)
        return replace(moved, once=moved.once - {self.new[view] for view in self.views})

    def _source(self, node: fx.Node) -> fx.Node:
        return self.arrived.get(node, self.new[node])

    def _await(self, source: fx.Node, user: fx.Node) -> None:
        """Wait for a parameter, or for the one that ``source`` views, before its first user."""
        if source in self.views and source not in self.new:
            self._await(source.all_input_nodes[0], user)
            self.new[source] = self.graph.node_copy(source, self._source)
            annotate(self.new[source], replace(facts(source), phase=facts(user).phase))
            self.stage[self.new[source]] = self.program.stage[source]
        elif source in self.parts and source not in self.arrived:
            name = f"{source.name}_arrived"
            node = self.graph.create_node("call_function", arrived, (self.new[source],), name=name)
            annotate(node, replace(facts(source), phase=facts(user).phase))
            self.arrived[source], self.stage[node] = node, self.program.stage[source]


def _read_in_microbatches(program: DifferentiatedProgram, node: fx.Node) -> bool:
    """Return whether only functions of microbatches read the gathered parameters, forwards first."""
    parts = list(node.users)
    if node not in program.once or not all(map(is_getitem, parts)):
        return False
    return all(_is_read_in_forward(program, part) for part in parts)


def _is_read_in_forward(program: DifferentiatedProgram, part: fx.Node) -> bool:
    """Return whether a parameter is read in microbatches alone, and first in a forward, or not at all."""
    readers = _readers(program, part)
    if not all(reader.op == "call_function" and reader not in program.once for reader in readers):
        return False
    return not readers or (facts(min(readers)).phase == "forward" and value(part).numel() > 0)


def _readers(program: DifferentiatedProgram, part: fx.Node) -> list[fx.Node]:
    """Return the nodes that read a parameter, or a view of it."""
    views = [user for user in part.users if user in program.once and op_spec(user).slices]
    return [reader for source in (part, *views) for reader in source.users if reader not in views]
