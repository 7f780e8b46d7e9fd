"""What it costs that rows travel to the ranks of their experts, by what an inner axis lets each rank send."""

from __future__ import annotations

import math
from collections import Counter

from torch import fx

from ...core.annotations import needs_grad, num_bytes, origin, shape, tensor_inputs, values
from ...core.sharding import Shard
from ...ir.program import Strategy
from ...ops.experts.scaled_groups import EXPERT_LAYERS
from ..strategies.expert_axes import hops, moved_there
from .axis_view import AxisView


class RowTravel:
    """Call it with an operator and its strategy on a model axis: seconds, forward and backward, 0 for all others.

    Each rank of the model axis may send whole rows over the axes of experts, or slices of them that are gathered behind
    these. So messages are priced by the links that they cross, with what starting them takes: of several layers in a
    row, on the way to the first and from the last.
    """

    def __init__(self, view: AxisView) -> None:
        self.view, self.axis = view, view.axis
        layers = [n for n in view.factors if n.target in EXPERT_LAYERS] if view.axis.role == "model" else []
        self.ways = {n: found for n in layers if (found := hops(view.before, view.chosen[n]))}
        self.follows = {n: _layers_before(n) for n in self.ways}
        alike = Counter(_reads(node) for node in self.ways)  # what arrives is shared
        self.part = {node: 1 / alike[_reads(node)] for node in self.ways}
        self.followed = frozenset(layer for found in self.follows.values() for layer in found)

    def __call__(self, node: fx.Node, strategy: Strategy) -> float:
        if node not in self.ways:
            return 0.0
        rows = tensor_inputs(node)[0]
        source, output = origin(rows)
        arriving = num_bytes(values(source)[output]) * self.view.left(source, output)
        leaving = num_bytes(values(node)[0]) * self.view.left(node, 0)
        gathered, scattered = moved_there((self.axis,), (strategy,))
        total, load = 0.0, self.view.load(node)
        for part, travelling, size, kind, moved, name in (
            (self.part[node], not self.follows[node], arriving, strategy.inputs[0], gathered, "all_gather"),
            (1.0, node not in self.followed, leaving, strategy.outputs[0], scattered, "reduce_scatter"),
        ):
            split = isinstance(kind, Shard)
            if travelling or moved or not split:  # terms, or what is the same on all ranks, is converted in between
                total += part * self._sent(node, load.sent * size / (self.axis.size if split else 1))
            if moved:
                total += part * self.view.cost.meeting_seconds(name, load.computed * size, self.axis.size)
        return total * (2 if needs_grad(node) else 1)  # gradients take the opposite way

    def _sent(self, node: fx.Node, num_bytes: float) -> float:
        """One way, of so many bytes on each rank."""
        return sum(
            self.view.cost.meeting_seconds("all_to_all", num_bytes * axis.size, axis.size, self._apart(axis.name))
            for axis, _ in self.ways[node]
        )

    def _apart(self, name: str) -> int:
        """How far neighbours along an axis lie apart: a model axis is the innermost."""
        within = self.view.before[[axis.name for axis in self.view.before].index(name) + 1 :]
        return math.prod(axis.size for axis in (*within, self.axis) if axis.role != "time")


def _reads(node: fx.Node) -> tuple[fx.Node, ...]:
    """The rows of a layer and their experts."""
    return tuple(tensor_inputs(node)[:2])


def _layers_before(node: fx.Node) -> frozenset[fx.Node]:
    """The layers of the same mixture whose results, but for operators on each row, are this one's rows: these stay
    where they are. Empty if its rows come from anywhere else."""
    ids, many = tensor_inputs(node)[1], shape(node)[0]
    found, todo, seen = set[fx.Node](), [tensor_inputs(node)[0]], set[fx.Node]()
    while todo:
        here = todo.pop()
        if here in seen:
            continue
        seen.add(here)
        if here.target in EXPERT_LAYERS and tensor_inputs(here)[1] is ids:
            found.add(here)
        elif here.op == "call_function" and all(x.dim() == 2 and x.shape[0] == many for x in values(here)):
            todo += here.all_input_nodes
        else:
            return frozenset()
    return frozenset(found)
