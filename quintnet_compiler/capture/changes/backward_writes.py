"""Check reads and writes of a module's state by the user's derivatives, in a graph that has in-place operators.

A derivative is traced at the place of its forward, but PyTorch runs it after the loss. So state that it reads must not
change in between, and state that it changes must not be read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import fx
from torch.export import ExportedProgram

from ...core.errors import CompileError
from ...ops.derivatives.user_derivatives import of_tangents
from ..places import where_of
from .memory import same_memory, statistics, written_arguments

BACKWARD = "quintnet_backward"  # key of a node's meta: the number of the derivative that computes it


def check_backwards(exported: ExportedProgram, reached: Collection[int]) -> None:
    """Check each derivative of the graph. ``reached``: those that the backward of the loss runs.

    Raises:
        CompileError: QN105 for state that a derivative changes and forward reads or changes later, or vice versa; for
            gradients that it writes to state; for state that a derivative changes which does not run.
    """
    nodes = list(exported.graph.nodes)
    if not any(BACKWARD in node.meta for node in nodes):
        return
    signature = exported.graph_signature
    names = signature.inputs_to_buffers | signature.inputs_to_parameters
    root: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        source = same_memory(node)
        root[node] = node if source is None else root[source]
    gradients = of_tangents(nodes)
    uses = _Uses(nodes, root)
    for node in nodes:
        number = node.meta.get(BACKWARD)
        if number is None:
            continue
        for x in {root[x] for x in node.all_input_nodes if root[x].name in names}:
            writes = any(root[written_node] is x for written_node in _changed(node))
            name = names[x.name].removeprefix("model.")
            if writes and node in gradients:
                _refuse(node, f"a derivative that is your own writes what it sees of gradients into {name!r}")
            if writes and number not in reached:
                _refuse(node, f"a derivative that is your own changes {name!r}, and the loss does not depend on it")
            if uses.conflict(node, x, writes):
                verb = "changes" if writes else "reads"
                _refuse(
                    node,
                    f"a derivative that is your own {verb} {name!r}, which the forward pass changes or reads later",
                )


class _Uses:
    """The nodes that read and write each memory of a graph. ``root``: the first node in the memory of a node."""

    def __init__(self, nodes: list[fx.Node], root: dict[fx.Node, fx.Node]) -> None:
        self._place = {node: i for i, node in enumerate(nodes)}
        self._writers: dict[fx.Node, list[fx.Node]] = {}
        self._users: dict[fx.Node, list[fx.Node]] = {}
        for node in nodes:
            for x in _changed(node):
                self._writers.setdefault(root[x], []).append(node)
            for x in node.all_input_nodes if node.op != "output" else ():
                self._users.setdefault(root[x], []).append(node)

    def conflict(self, node: fx.Node, x: fx.Node, writes: bool) -> bool:
        """Return whether nodes after ``node``, of no or another derivative, use ``x``; for a read: write it."""
        others = self._users[x] if writes else self._writers.get(x, [])
        number = node.meta[BACKWARD]
        return any(self._place[n] > self._place[node] and n.meta.get(BACKWARD) != number for n in others)


def _changed(node: fx.Node) -> Iterator[fx.Node]:
    yield from written_arguments(node)
    yield from statistics(node)


def _refuse(node: fx.Node, what: str) -> None:
    raise CompileError("QN105", f"{what}; a program would not do so at the same time", where=where_of(node))
