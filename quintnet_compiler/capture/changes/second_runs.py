"""Add the changes that the second run of a checkpoint makes, in a traced graph that has in-place operators.

    h = linear(x)                           h = linear(x)
    batch_norm(h, mean, variance)    ->     batch_norm(h, mean, variance)
    loss = ...                              batch_norm(h, mean, variance)      # of the second run
                                            loss = ...

PyTorch runs a checkpoint's forward again when the backward reaches it: the last checkpoint first, all after the loss.
Its changes are computed again after everything else that reads or writes the same memory. Values that it computes from
the same inputs are not computed again, so gradients are those of the first run. If they would differ, because the
second run reads values that have changed since, the checkpoint is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from ...compat.torch import draws_random_numbers, pytree
from ...core.errors import CompileError
from ...ops.catalog import op_spec
from ..derivatives.checkpoints import ASSIGNED, CHECKPOINTS, Checkpoint, Checkpoints, bodies
from .memory import same_memory, statistics, written_arguments
from .no_grad import WITHOUT_GRADIENTS

aten = torch.ops.aten


def run_again(exported: ExportedProgram, checkpoints: Checkpoints) -> None:
    """Add the changes of the second runs of ``checkpoints`` to the graph of ``exported``.

    Raises:
        CompileError: QN105 with the line of a checkpoint whose second run has other gradients than the first, or whose
            second run this module does not follow.
    """
    graph, signature = exported.graph, exported.graph_signature
    checkpoint_nodes = bodies(graph, checkpoints)
    if not checkpoint_nodes or not any([*written_arguments(node), *statistics(node)] for node in graph.nodes):
        return
    memory = _TracedMemory.of_graph(graph)
    parameters = signature.inputs_to_parameters
    names = {key: name.removeprefix("model.") for key, name in (signature.inputs_to_buffers | parameters).items()}
    inputs = [node for node in graph.nodes if node.op == "placeholder" and node.name in parameters]
    grown = _grown(memory, [x for x in inputs if exported.state_dict[parameters[x.name]].requires_grad])
    differentiates = any(op_spec(node).inner_gradient == "gradient" for node in graph.nodes)
    for checkpoint, nodes in reversed(checkpoint_nodes):
        _SecondRun(graph, memory, names, grown, checkpoint, nodes, differentiates).add()
    graph.lint()


@dataclass
class _TracedMemory:
    """``root``: the first value with the memory of each; ``users``, ``writers``: of that memory."""

    root: dict[fx.Node, fx.Node] = field(default_factory=dict)
    users: dict[fx.Node, list[fx.Node]] = field(default_factory=lambda: defaultdict(list))
    writers: dict[fx.Node, list[fx.Node]] = field(default_factory=lambda: defaultdict(list))

    @classmethod
    def of_graph(cls, graph: fx.Graph) -> _TracedMemory:
        memory = cls()
        for node in graph.nodes:
            memory.add(node)
        return memory

    def add(self, node: fx.Node) -> None:
        source = same_memory(node)
        self.root[node] = node if source is None else self.root[source]
        if node.op == "output":
            return
        for x in node.all_input_nodes:
            self.users[self.root[x]].append(node)
        for x in (*written_arguments(node), *statistics(node)):
            self.writers[self.root[x]].append(node)


@dataclass
class _SecondRun:
    """The second run of a checkpoint.

    ``differs``: for memory that has other values than in the first run, at the same place, the inputs of the graph, or
    other values from outside of the checkpoint, that cause it.
    """

    graph: fx.Graph
    memory: _TracedMemory
    names: Mapping[str, str]
    grown: Collection[fx.Node]
    checkpoint: Checkpoint
    nodes: list[fx.Node]
    differentiates: bool
    differs: dict[fx.Node, frozenset[fx.Node]] = field(default_factory=dict)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def add(self) -> None:
        """Add the second run to the graph."""
        inside, writers = set(self.nodes), self.memory.writers
        self.nodes = [*self.nodes, *self._assigned(inside)]
        reads = {self.memory.root[x] for node in self.nodes for x in node.all_input_nodes} - inside
        changed = {x for x in reads if any(not writer < self.nodes[0] for writer in writers[x])}
        writes = {x for x in changed if any(writer in self.nodes for writer in writers[x])}
        self.differs = {x: frozenset([x]) for x in changed}
        if not changed:
            return
        self._check(writes)
        repeated = [node for node in self.nodes if self._is_repeated(node)]
        if writes:
            place = self._last_conflict(reads, writes)
            for node in repeated:
                place = self._repeat(node, place)

    def _last_conflict(self, reads: Collection[fx.Node], writes: Collection[fx.Node]) -> fx.Node:
        """Return the last node that is in the first run, uses what the second one writes, or writes what it reads."""
        users = [node for x in writes for node in self.memory.users[x]]
        writers = [node for x in reads for node in self.memory.writers[x]]
        return max([*self.nodes, *users, *writers])

    def _assigned(self, inside: Collection[fx.Node]) -> list[fx.Node]:
        """Return the writes of tensors by which the body replaces buffers: forward makes them at its end."""
        writes = [node for node in self.graph.nodes if ASSIGNED in node.meta and list(written_arguments(node))]
        mine = [node for node in writes if any(self.memory.root[x] in inside for x in node.all_input_nodes)]
        if mine and self.checkpoint.options.stops and not self.checkpoint.reentrant:
            self._refuse(
                "whether the second run still assigns a buffer depends on where it ends",
                "change the buffer in place (self.count.add_(1)) instead of assigning another one",
            )
        return mine

    def _check(self, writes: Collection[fx.Node]) -> None:
        """Refuse checkpoints whose second run a graph cannot have."""
        numbers = {number for node in self.nodes for number in node.meta.get(CHECKPOINTS, ())}
        causes = {
            "it is inside of another checkpoint, or has one inside": len(numbers) > 1,
            "a mode of its own decides what the second run computes": self.checkpoint.options.selective,
            "a torch.autograd.Function is inside": self.checkpoint.has_functions and not self.checkpoint.reentrant,
            "torch.autograd.grad in forward may run it once more": self.differentiates,
        }
        for cause, holds in causes.items():
            if holds:
                self._refuse(f"it changes {self._names(writes)}, and {cause}" if writes else cause)

    def _is_repeated(self, node: fx.Node) -> bool:
        """Return whether the second run of a node has other results or effects, or its memory changes later.

        Called for each node in order.

        Raises:
            CompileError: QN105 if gradients or random numbers of the second run would differ.
        """
        root, norms, targets = self.memory.root, statistics(node), list(written_arguments(node))
        whole = [x for x in targets if op_spec(node).overwrites and root[x] is x]
        read = [x for x in node.all_input_nodes if x not in norms and x not in whole]
        differs = frozenset[fx.Node]().union(*(self.differs.get(root[x], ()) for x in read))
        self._check_values(node, differs)
        if root[node] is node and node.op == "call_function":
            self.differs[node] = differs
        for x in targets:
            old = frozenset() if x in whole else self.differs.get(root[x], frozenset())
            self.differs[root[x]] = old | differs
        return bool(targets or norms or differs or self.memory.writers[root[node]])

    def _check_values(self, node: fx.Node, differs: Collection[fx.Node]) -> None:
        """Refuse gradients and random numbers that would not be those of the first run, due to ``differs``."""
        if differs and (node in self.grown or draws_random_numbers(node.target)):
            names = self._names(differs)
            self._refuse(f"the second run's gradients are computed with {names} as the whole forward leaves it")
        if draws_random_numbers(node.target) and not self.checkpoint.options.same_numbers:
            self._refuse("with preserve_rng_state=False the second run draws other random numbers than the first")

    def _repeat(self, node: fx.Node, place: fx.Node) -> fx.Node:
        """Insert the second run of ``node`` after ``place``; return the last node that was inserted."""
        if draws_random_numbers(node.target):
            return self._repeat_draw(node, place)
        with self.graph.inserting_after(place):
            copy = self.graph.node_copy(node, self._second)
        return self._add_copy(node, copy)

    def _repeat_draw(self, node: fx.Node, place: fx.Node) -> fx.Node:
        """Insert the random numbers of the first run, before any change of them."""
        if not isinstance(node.meta.get("val"), Tensor):
            self._refuse(f"the second run draws the random numbers of {node.target} again")
        with self.graph.inserting_after(node):
            drawn = self.graph.call_function(aten.clone.default, (node,))
        drawn.meta = {**node.meta, "val": torch.empty_like(node.meta["val"]), WITHOUT_GRADIENTS: True}
        self.memory.add(drawn)
        targets = list(written_arguments(node))
        with self.graph.inserting_after(place):
            if targets:
                copy = self.graph.call_function(aten.copy_.default, (self._second(targets[0]), drawn))
            else:
                copy = self.graph.call_function(aten.clone.default, (drawn,))
        copy.meta = dict(node.meta)
        return self._add_copy(node, copy)

    def _add_copy(self, node: fx.Node, copy: fx.Node) -> fx.Node:
        copy.meta = {name: x for name, x in copy.meta.items() if name != CHECKPOINTS}
        copy.meta[WITHOUT_GRADIENTS] = True
        self.copies[node] = copy
        self.memory.add(copy)
        return copy

    def _second(self, x: fx.Node) -> fx.Node:
        return self.copies.get(x, x)

    def _names(self, inputs: Collection[fx.Node]) -> str:
        names = sorted(self.names[x.name] for x in inputs if x.name in self.names)
        return ", ".join(map(repr, names[:3])) or "a tensor from outside"

    def _refuse(self, cause: str, fix: str = "") -> NoReturn:
        raise CompileError(
            "QN105",
            f"torch.utils.checkpoint runs this part a second time in the backward, which a program would not: {cause}",
            where=self.checkpoint.where,
            fix=fix or 'call the part without torch.utils.checkpoint, and give quintnet.compile recompute="full"',
        )


def _grown(memory: _TracedMemory, trained: Collection[fx.Node]) -> set[fx.Node]:
    """Return the nodes that have a gradient, also by in-place operators."""
    grown = set(trained)
    for node in memory.root:
        flows = WITHOUT_GRADIENTS not in node.meta and op_spec(node).detaches != "of its own"
        flows = flows and node.op == "call_function" and _differentiable(node)
        if flows and any(x in grown for x in node.all_input_nodes):
            grown.add(node)
            grown.update(memory.root[x] for x in written_arguments(node))
    return grown


def _differentiable(node: fx.Node) -> bool:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return any(isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) for x in leaves)
