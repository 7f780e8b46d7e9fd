"""The copies of hot experts: those that a plan decides on, and the part of a rank in making them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from ...core.annotations import shape
from ...ir.builder import GraphBuilder
from ...ir.program import Axis
from .layers import hot_experts
from .ops import pick_experts


@dataclass(frozen=True)
class HotExpertCopies:
    """Copies of hot experts, see :class:`...strategies.expert_copies.ExpertCopies`.

    Attributes:
        asked: names or globs of parameters of experts -> numbers of experts.
    """

    asked: Mapping[str, Sequence[int]]

    def experts(self, graph: fx.Graph) -> dict[fx.Node, tuple[int, ...]]:
        """Return the hot experts of each layer that has any."""
        return hot_experts(graph, self.asked)

    def emit_part(
        self, builder: GraphBuilder, stored: fx.Node, experts: Sequence[int], split: Sequence[Axis]
    ) -> fx.Node:
        """Emit the hot ones of the experts that a rank stores, with zeros for those of other ranks."""
        names, sizes = [axis.name for axis in split], [axis.size for axis in split]
        return builder.call(pick_experts, stored, list(experts), shape(stored)[0], names, sizes)
