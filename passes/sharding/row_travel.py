"""Prices of sending rows to the ranks of their experts, by what an inner axis lets each rank send."""

from __future__ import annotations

import math
from collections import Counter

from torch import fx

from ...core.annotations import needs_grad, origin, shape, tensor_inputs, values
from ...core.sharding import Shard
from ...ir.program import Strategy
from ...ops.catalog import op_spec
from ...strategies.expert_axes import hops, row_conversions
from .axis_view import AxisView


class RowTravel:
    """The seconds, forward and backward, that an operator's rows travel: call it with an operator and its strategy.

    It is 0 for all but layers of experts on a model axis. Each rank of the model axis may send whole rows over the axes
    of experts, or slices of them that are gathered where they arrive. So messages are priced by the links that they
    cross, with their latency: of several layers in a row, on the way to the first and from the last.

    Attributes:
        hops: for each layer, the axes on which its rows travel.
        preceding: for each layer, those of the same mixture whose results it reads.
        followed: layers whose results another layer of the mixture reads.
        part: the part of the way to the experts that a layer pays for; layers that read the same rows share it.
    """

    def __init__(self, view: AxisView) -> None:
        self.view, self.axis = view, view.axis
        layers = [n for n in view.factors if op_spec(n).by_expert] if view.axis.role == "model" else []
        self.hops = {n: axes for n in layers if (axes := hops(view.outer, view.chosen[n]))}
        self.preceding = {n: _preceding_layers(n) for n in self.hops}
        readers = Counter(_rows_and_experts(node) for node in self.hops)
        self.part = {node: 1 / readers[_rows_and_experts(node)] for node in self.hops}
        self.followed = frozenset(layer for layers in self.preceding.values() for layer in layers)

    def __call__(self, node: fx.Node, strategy: Strategy) -> float:
        if node not in self.hops:
            return 0.0
        source, output = origin(tensor_inputs(node)[0])
        arriving_bytes = self.view.local_bytes(source, output)
        leaving_bytes = self.view.local_bytes(node, 0)
        gathered, scattered = row_conversions((self.axis,), (strategy,))
        seconds, load = 0.0, self.view.load(node)
        for part, travels, size, kind, conversion, collective in (
            (self.part[node], not self.preceding[node], arriving_bytes, strategy.inputs[0], gathered, "all_gather"),
            (1.0, node not in self.followed, leaving_bytes, strategy.outputs[0], scattered, "reduce_scatter"),
        ):
            split = isinstance(kind, Shard)
            if travels or conversion or not split:  # partial and replicated rows are converted between layers
                seconds += part * self._sending_seconds(node, load.sent * size / (self.axis.size if split else 1))
            if conversion:
                seconds += part * self.view.cost.meeting_seconds(collective, load.computed * size, self.axis.size)
        return seconds * (2 if needs_grad(node) else 1)  # gradients travel back

    def _sending_seconds(self, node: fx.Node, num_bytes: float) -> float:
        """Return the seconds of one way, with so many bytes on each rank."""
        return sum(
            self.view.cost.meeting_seconds("all_to_all", num_bytes * axis.size, axis.size, self._stride(axis.name))
            for axis, _ in self.hops[node]
        )

    def _stride(self, name: str) -> int:
        """Return the distance between neighbours along an axis, in ranks: a model axis is the innermost."""
        within = self.view.outer[[axis.name for axis in self.view.outer].index(name) + 1 :]
        return math.prod(axis.size for axis in (*within, self.axis) if axis.role != "time")


def _rows_and_experts(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the rows of a layer and their expert ids."""
    return tuple(tensor_inputs(node)[:2])


def _preceding_layers(node: fx.Node) -> frozenset[fx.Node]:
    """Return the layers of the same mixture whose results, but for operators on each row, are this layer's rows.

    These rows stay on their ranks. Empty if its rows come from anywhere else.
    """
    ids, num_rows = tensor_inputs(node)[1], shape(node)[0]
    layers, todo, seen = set[fx.Node](), [tensor_inputs(node)[0]], set[fx.Node]()
    while todo:
        source = todo.pop()
        if source in seen:
            continue
        seen.add(source)
        if op_spec(source).by_expert and tensor_inputs(source)[1] is ids:
            layers.add(source)
        elif source.op == "call_function" and all(x.dim() == 2 and x.shape[0] == num_rows for x in values(source)):
            todo += source.all_input_nodes
        else:
            return frozenset()
    return frozenset(layers)
