"""Mark the operators of a trace that ``torch.utils.checkpoint`` runs a second time in the backward.

The second run changes buffers and parameters again. A trace has each operator once, so they are marked here, and
:mod:`..changes.second_runs` adds the changes of the second run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx

from ...compat.torch_checkpoints import CheckpointOptions, saves_tensors, sequence_number, sequence_number_of
from ...compat.torch_func import graph_of_trace, nodes_of_trace
from ...core.errors import Where
from ..changes.user_frames import user_line
from ..places import OWN

CHECKPOINTS = "quintnet_checkpoints"  # key of a node's meta: the numbers of the checkpoints that run it again
ASSIGNED = "quintnet_assigned"  # key of the meta of writes of tensors by which forward replaced buffers


@dataclass
class Checkpoint:
    """One call of ``torch.utils.checkpoint`` in a trace.

    Attributes:
        number: Its position among the trace's checkpoints.
        graph: Of the trace.
        where: The line of the call.
        options: Of the call.
        reentrant: Whether the checkpoint is reentrant.
        first: The number of nodes of the trace before it.
        begin: The sequence number in autograd's graph at its beginning.
        end: The sequence number at its end.
        last: The number of nodes of the trace when the last tensor was saved.
        runs_again: Whether the backward of the loss reaches it.
        has_functions: Whether a Function of the user's is inside.
    """

    number: int
    graph: fx.Graph
    where: Where
    options: CheckpointOptions
    reentrant: bool
    first: int
    begin: int
    end: int = 0
    last: int = 0
    runs_again: bool = False
    has_functions: bool = False

    def save(self, x: Tensor) -> Tensor:
        """Record that a tensor is saved for the backward."""
        self.last = len(self.graph.nodes)
        return x


class Checkpoints:
    """All checkpoints of a trace, in order, and those that are open."""

    def __init__(self) -> None:
        self.every: list[Checkpoint] = []
        self.open: list[Checkpoint] = []

    def open_checkpoint(self, options: CheckpointOptions, where: Where, *, reentrant: bool) -> Checkpoint:
        """Open a checkpoint."""
        graph = graph_of_trace()
        checkpoint = Checkpoint(len(self.every), graph, where, options, reentrant, len(graph.nodes), sequence_number())
        self.every.append(checkpoint)
        self.open.append(checkpoint)
        return checkpoint

    def close_checkpoint(self) -> None:
        """Close the innermost checkpoint, and mark the nodes that its second run computes."""
        checkpoint = self.open.pop()
        checkpoint.end = sequence_number()
        nodes = list(checkpoint.graph.nodes)
        whole = checkpoint.reentrant or not checkpoint.options.stops
        for node in nodes[checkpoint.first : len(nodes) if whole else checkpoint.last]:
            node.meta[CHECKPOINTS] = (*node.meta.get(CHECKPOINTS, ()), checkpoint.number)

    def function(self) -> None:
        """Record a Function of the user's in the open checkpoints; it may save tensors later."""
        for checkpoint in self.open:
            checkpoint.has_functions = True

    def reach(self, nodes: Iterable[Any]) -> None:
        """Record that the backward of the loss runs these nodes of autograd's graph."""
        numbers = [(sequence_number_of(node), saves_tensors(node)) for node in nodes]
        for checkpoint in self.every:
            inside = [saves for number, saves in numbers if checkpoint.begin <= number < checkpoint.end]
            checkpoint.runs_again = bool(inside) if checkpoint.reentrant else any(inside)

    def mark_assigned(self, first: int) -> None:
        """Mark nodes of the trace from ``first`` on: they write tensors by which forward replaced buffers."""
        for node in nodes_of_trace()[first:]:
            node.meta[ASSIGNED] = True


def line_of_checkpoint() -> Where:
    """Return the user's line that calls a checkpoint now."""
    return Where("", user_line(sys._getframe(1), OWN))


def bodies(graph: fx.Graph, checkpoints: Checkpoints) -> list[tuple[Checkpoint, list[fx.Node]]]:
    """Return the checkpoints that run again, in order, each with the nodes that it computes."""
    nodes_by_number: dict[int, list[fx.Node]] = {c.number: [] for c in checkpoints.every if c.runs_again}
    for node in graph.nodes:
        for number in node.meta.get(CHECKPOINTS, ()):
            if number in nodes_by_number:
                nodes_by_number[number].append(node)
    return [(checkpoints.every[number], members) for number, members in nodes_by_number.items() if members]
