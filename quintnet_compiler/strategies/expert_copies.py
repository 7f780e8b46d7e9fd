"""Experts of which every rank has a copy, so that their rows stay, and the rows that the busiest rank then has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import fx

from ..core.annotations import shape, tensor_inputs
from ..ir.builder import GraphBuilder
from ..ir.expectations import Expectations, ExpertLoad
from ..ir.program import Axis
from ..ops.catalog import op_spec


class ExpertCopies(Protocol):
    """Copies of experts on all ranks among which a layer's experts are split."""

    def experts(self, graph: fx.Graph) -> Mapping[fx.Node, tuple[int, ...]]:
        """Return the numbers of the experts that have copies, of each layer that has any."""

    def emit_part(
        self, builder: GraphBuilder, stored: fx.Node, experts: Sequence[int], split: Sequence[Axis]
    ) -> fx.Node:
        """Emit what a rank adds to the copies of ``experts``, which are the sum over ranks.

        Args:
            builder: emits nodes.
            stored: the weights of the experts that the rank stores, [stored, ...].
            experts: the numbers of the experts with copies.
            split: the axes that split experts, the outermost first.

        Returns:
            [len(experts), ...]
        """


def expert_loads(graph: fx.Graph, copies: ExpertCopies | None, expect: Expectations) -> dict[fx.Node, ExpertLoad]:
    """Return the loads of layers of experts whose ranks are expected to get, or send, different numbers of rows."""
    copied = {} if copies is None else copies.experts(graph)
    layers = [node for node in graph.nodes if node.op == "call_function" and op_spec(node).by_expert]
    loads = {
        node: ExpertLoad.expected(expect, len(copied.get(node, ())), shape(tensor_inputs(node)[2])[0])
        for node in layers
    }
    return {node: load for node, load in loads.items() if load != ExpertLoad()}
