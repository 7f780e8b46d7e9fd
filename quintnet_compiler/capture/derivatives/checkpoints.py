"""``torch.utils.checkpoint`` while a module is traced: which operators PyTorch runs a second time in the backward.

The second run changes buffers and parameters again. A trace has each operator once, so it marks them here, and
:mod:`..changes.second_runs` adds what the second run changes.
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
from ..places import OWN
from ..watched_trace import user_line

CHECKPOINTS = "quintnet_checkpoints"  # an entry of ``meta``: the numbers of the checkpoints that run a node again
ASSIGNED = "quintnet_assigned"  # likewise, of the writes of tensors that forward put in the places of buffers


@dataclass
class Checkpoint:
    """One call of ``torch.utils.checkpoint`` in a trace.

    ``graph``: of the trace; ``begin``, ``end``: of its nodes in autograd's graph; ``last``: how many operators the
    trace had when the last tensor was saved; ``runs_again``: whether the backward of the loss reaches it;
    ``has_functions``: whether a derivative that is the user's own is inside.
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
        """Note that a tensor is saved for the backward."""
        self.last = len(self.graph.nodes)
        return x


class Checkpoints:
    """All checkpoints of a trace, in order, and those that it is in."""

    def __init__(self) -> None:
        self.every: list[Checkpoint] = []
        self.open: list[Checkpoint] = []

    def begin(self, options: CheckpointOptions, where: Where, *, reentrant: bool) -> Checkpoint:
        """A checkpoint begins."""
        graph = graph_of_trace()
        checkpoint = Checkpoint(len(self.every), graph, where, options, reentrant, len(graph.nodes), sequence_number())
        self.every.append(checkpoint)
        self.open.append(checkpoint)
        return checkpoint

    def end(self) -> None:
        """The innermost checkpoint ends: mark what its second run computes."""
        checkpoint = self.open.pop()
        checkpoint.end = sequence_number()
        nodes = list(checkpoint.graph.nodes)
        whole = checkpoint.reentrant or not checkpoint.options.stops
        for node in nodes[checkpoint.first : len(nodes) if whole else checkpoint.last]:
            node.meta[CHECKPOINTS] = (*node.meta.get(CHECKPOINTS, ()), checkpoint.number)

    def function(self) -> None:
        """A Function that is the user's own is applied. Where it is is not where it saves what its backward reads."""
        for checkpoint in self.open:
            checkpoint.has_functions = True

    def reach(self, nodes: Iterable[Any]) -> None:
        """The backward of the loss runs these nodes of autograd's graph."""
        numbers = [(sequence_number_of(node), saves_tensors(node)) for node in nodes]
        for checkpoint in self.every:
            inside = [saves for number, saves in numbers if checkpoint.begin <= number < checkpoint.end]
            checkpoint.runs_again = bool(inside) if checkpoint.reentrant else any(inside)

    def mark_assigned(self, first: int) -> None:
        """What the trace has from here on writes what forward put in the places of buffers."""
        for node in nodes_of_trace()[first:]:
            node.meta[ASSIGNED] = True


def line_of_checkpoint() -> Where:
    """The user's line that calls a checkpoint now."""
    return Where("", user_line(sys._getframe(1), OWN))


def bodies(graph: fx.Graph, checkpoints: Checkpoints) -> list[tuple[Checkpoint, list[fx.Node]]]:
    """Return what the second run of each checkpoint computes, for those that have one, in order."""
    found: dict[int, list[fx.Node]] = {c.number: [] for c in checkpoints.every if c.runs_again}
    for node in graph.nodes:
        for number in node.meta.get(CHECKPOINTS, ()):
            if number in found:
                found[number].append(node)
    return [(checkpoints.every[number], nodes) for number, nodes in found.items() if nodes]
