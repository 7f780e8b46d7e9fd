"""DifferentiatedProgram -> DifferentiatedProgram: parameters wait in host memory for what reads them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from ...core.annotations import annotate, facts, is_getitem, leaf, origin, value, viewed
from ...ir.program import DifferentiatedProgram
from ...ir.repeated_blocks import block_of
from ...ops.copies import copy_in

HOST = torch.device("cpu")
Place = tuple[int, str, Hashable]  # a stage, a phase, and a block or a run of nodes between two blocks


@dataclass(frozen=True)
class OffloadParameters:
    """Store parameters on the host; each block copies in those it reads, once in its forward and once in its backward.

    After Rajbhandari et al. 2021, ZeRO-Infinity.

    Before: %w = all_gather(%p, dp);  %y = linear(%x, %w);  ...;  %v = all_gather(%p, dp);  %g = mm(%gy, %v)
    After:  %i = copy_in(%p);  %w = all_gather(%i, dp);  %y = linear(%x, %w);  ...;
            %j = copy_in(%p);  %v = all_gather(%j, dp);  %g = mm(%gy, %v)
    Ensures: the same values. Only ``copy_in`` reads a parameter. No copy outlives the block that reads it: views of a
    parameter, and values that are computed from parameters alone once a step (copies in 16 bits, scales), are computed
    again from each copy.
    """

    def __call__(self, program: DifferentiatedProgram, /) -> DifferentiatedProgram:
        """Return the program that copies parameters in."""
        return _InFunctions(program, _repeated(program)).run()


def _repeated(program: DifferentiatedProgram) -> set[fx.Node]:
    """Return the parameters, and the nodes that are computed from them again in each block."""
    results = {*program.outputs, *program.gradients.values()}
    repeated: set[fx.Node] = set()
    for node in program.graph.nodes:
        node_leaf = leaf(node) if node.op == "placeholder" else None
        if node_leaf is not None and node_leaf.kind == "parameter":
            repeated.add(node)
        elif node.op == "call_function" and node not in results and repeated.intersection(node.all_input_nodes):
            stage = program.stage.get(node)
            in_one_stage = all(program.stage.get(user) == stage for user in node.users if user.op != "output")
            if in_one_stage and (node in program.once or _views(node, repeated)):
                repeated.add(node)
    return repeated


def _views(node: fx.Node, repeated: set[fx.Node]) -> bool:
    if is_getitem(node):
        return origin(node)[0] in repeated
    return viewed(node) is not None and repeated.issuperset(node.all_input_nodes)


@dataclass
class _InFunctions:
    """A copy of a program in which each function copies the parameters that it reads (``here``: by place)."""

    program: DifferentiatedProgram
    repeated: set[fx.Node]
    graph: fx.Graph = field(default_factory=fx.Graph)
    new: dict[fx.Node, fx.Node] = field(default_factory=dict)
    here: dict[tuple[Place, fx.Node], fx.Node] = field(default_factory=dict)
    stage: dict[fx.Node, int] = field(default_factory=dict)

    def run(self) -> DifferentiatedProgram:
        gap, previous = 0, None  # the number of runs of nodes so far
        for node in self.program.graph.nodes:
            if node.op == "output":
                break
            if leaf(node) is not None and node in self.repeated:
                self._leaf(node)
            elif node not in self.repeated:
                block = block_of(node)
                gap, previous = gap + (block != previous), block
                self._emit(node, block or gap)
        last = self.program.local.staged.num_stages - 1
        outputs = tuple(self._whole((last, "forward", "result"), node) for node in self.program.outputs)
        old = self.program.gradients
        gradients = {key: self._whole((key[1], "backward", "gradient"), node) for key, node in old.items()}
        self.graph.output((*outputs, *dict.fromkeys(gradients.values())))
        self.graph.lint()
        return replace(self._moved(), outputs=outputs, gradients=gradients)

    def _leaf(self, node: fx.Node) -> None:
        self.new[node] = self.graph.node_copy(node)
        x = value(node)
        with self.program.local.mode:
            host = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=HOST)
        annotate(self.new[node], replace(facts(node), value=host))

    def _emit(self, node: fx.Node, part: Hashable) -> None:
        stage = self.program.stage.get(node)
        place = (-1 if stage is None else stage, facts(node).phase, part)
        copies = {source: self._copy(place, source, node) for source in node.all_input_nodes if source in self.repeated}
        self.new[node] = self.graph.node_copy(node, lambda n: copies[n] if n in copies else self.new[n])
        if stage is not None:
            self.stage[self.new[node]] = stage

    def _copy(self, place: Place, node: fx.Node, reader: fx.Node) -> fx.Node:
        """Return the copy of a repeated node that readers at ``place`` share."""
        if (place, node) not in self.here:
            stage, phase, _ = place
            new_facts = replace(facts(node), phase=phase, where=facts(reader).where)  # type: ignore[arg-type]
            if leaf(node) is not None:
                device = torch.device(value(node).device.type)
                args = self.new[node], device
                copy = self.graph.create_node("call_function", copy_in, args, name=f"{node.name}_in")
                new_facts = replace(new_facts, leaf=None)
            else:
                sources = {x: self._copy(place, x, reader) for x in node.all_input_nodes if x in self.repeated}
                copy = self.graph.node_copy(node, lambda n: sources[n] if n in sources else self.new[n])
            self.here[place, node] = annotate(copy, new_facts)
            self.stage[copy] = stage
        return self.here[place, node]

    def _whole(self, place: Place, node: fx.Node) -> fx.Node:
        """Return the copy of a result or a gradient, which may be a parameter."""
        return self._copy(place, node, node) if node in self.repeated else self.new[node]

    def _moved(self) -> DifferentiatedProgram:
        """Return the new program; facts about a node with several copies go to its first copy."""
        copied = {node for node in self.repeated if leaf(node) is None}
        first: dict[fx.Node, fx.Node] = {}
        for (_, node), copy in self.here.items():
            first.setdefault(node, copy)
        new = {**self.new, **{node: first[node] for node in copied}}
        return replace(self.program, once=self.program.once - copied).moved(self.graph, new, self.stage)
