"""One stage's share of a program's graph: forward, backward, and the values between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from torch import fx

from ...core.annotations import facts, leaf
from ...core.errors import CompileError
from ...ir.program import DifferentiatedProgram
from ...ops.catalog import op_spec


@dataclass
class StageCut:
    """A stage's share of the graph.

    Attributes:
        once: nodes that run once a step.
        forward: nodes of the forward of a microbatch; ``backward``: of its backward.
        slices: microbatches of the batch.
        received: values that other stages send.
        carried: buffers that a batch changes for the next, each with its new value.
    """

    program: DifferentiatedProgram
    index: int
    num_stages: int
    once: list[fx.Node] = field(default_factory=list)
    forward: list[fx.Node] = field(default_factory=list)
    backward: list[fx.Node] = field(default_factory=list)
    slices: list[fx.Node] = field(default_factory=list)
    received: list[fx.Node] = field(default_factory=list)
    carried: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Sort the nodes that the stage needs into its lists."""
        needed = self._needed()
        for node in self.program.graph.nodes:
            if node in needed:
                self._part(node).append(node)

    def _needed(self) -> set[fx.Node]:
        """Return the operators that the stage's results, gradients and new buffers need, and find ``carried``."""
        needed: set[fx.Node] = {n for n in self.results().values() if n.op != "placeholder"}
        needed.update(self.gradients())
        needed = {node for node in needed if node.op == "call_function"}
        while True:  # the new value of a buffer may depend on another buffer
            self._add_sources(needed)
            self.carried = self._carried(needed)
            new_values = {new for new in self.carried.values() if new.op == "call_function"}
            if new_values <= needed:
                return needed
            needed |= new_values

    def _add_sources(self, needed: set[fx.Node]) -> None:
        """Add the stage's own operators, and what they and ``needed`` are computed from."""
        stage = self.program.stage
        for node in reversed(self.program.graph.nodes):
            runs = node.op == "call_function" and (
                stage.get(node) == self.index or (node in needed and node not in stage)
            )
            if runs:
                needed.add(node)
                needed.update(n for n in node.all_input_nodes if n.op == "call_function")

    def _part(self, node: fx.Node) -> list[fx.Node]:
        """Return the list that a node belongs to."""
        stage = self.program.stage
        if node in stage and stage[node] != self.index:
            return self.received
        if op_spec(node).cuts_microbatch:
            return self.slices
        if node in self.program.once:
            return self.once
        return self.backward if facts(node).phase == "backward" else self.forward

    def _carried(self, needed: Set[fx.Node]) -> dict[fx.Node, fx.Node]:
        """Return the buffers that this stage reads, each with its value in the next batch of the step.

        Raises:
            CompileError: QN206 if another stage computes that.
        """
        new_buffers = self.program.local.staged.sharded.program.carried
        placeholders = (node for node in self.program.graph.nodes if node.op == "placeholder")
        buffers = {node: source.name for node in placeholders if (source := leaf(node)) and source.name in new_buffers}
        carried: dict[fx.Node, fx.Node] = {}
        computed = (node for node in needed if self.program.stage.get(node, self.index) == self.index)
        todo = {n for node in computed for n in node.all_input_nodes} | set(self.results().values())
        while todo := todo & buffers.keys() - carried.keys():
            carried |= {node: self.program.outputs[new_buffers[buffers[node]]] for node in todo}
            todo = {carried[node] for node in todo}  # two buffers may swap their values
        for node, new in carried.items():
            if (home := self.program.stage.get(new, self.index)) != self.index:
                raise CompileError(
                    "QN206",
                    f"stage {self.index} reads the buffer {buffers[node]}, stage {home} changes it in each microbatch",
                    where=facts(new).where,
                    fix="let the stages begin elsewhere: stages=",
                )
        return {node: carried[node] for node in self.program.graph.nodes if node in carried}

    def results(self) -> dict[int, fx.Node]:
        """Return the stage's results by position: one value may be several results."""
        last = self.num_stages - 1
        return {
            position: node
            for position, node in enumerate(self.program.outputs)
            if self.program.stage.get(node, last) == self.index
        }

    def gradients(self) -> dict[fx.Node, list[str]]:
        """Return the gradients of this stage, each with its parameters: those of a + b have one gradient."""
        gradients: dict[fx.Node, list[str]] = defaultdict(list)
        for (name, stage), node in self.program.gradients.items():
            if stage == self.index:
                gradients[node].append(name)
        return gradients

    def saved_values(self) -> list[fx.Node]:
        """Return the values of the forward that the backward reads."""
        received = {n for n in self.received if facts(n).phase == "forward"}
        of_forward = {*self.forward, *self.slices, *received, *self.carried}
        backward = set(self.backward)
        return [n for n in self.program.graph.nodes if n in of_forward and used_in(n, backward)]

    def used_leaves(self) -> list[fx.Node]:
        """Return the leaves that the stage reads, in the order of their first use."""
        nodes = [*self.once, *self.forward, *self.backward, *self.slices, *self.results().values()]
        return _leaves([*nodes, *self.carried.values()])


def used_in(node: fx.Node, users: Set[fx.Node]) -> bool:
    """Return whether one of ``users`` reads a node."""
    return any(user in users for user in node.users)


def _leaves(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    leaves: dict[fx.Node, None] = {}
    for node in nodes:
        for source in (node, *node.all_input_nodes):
            if source.op == "placeholder":
                leaves[source] = None
    return list(leaves)
