"""The values of a block that the backward recomputes, as a minimum cut of the block's graph."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...core.annotations import facts, leaf, memory_of, num_bytes, origin, values
from ...ir.program import DifferentiatedProgram
from ...ir.repeated_blocks import Block, block_of
from ...ops.catalog import op_spec, spec_of
from ...ops.rules.work import takes_long

aten = torch.ops.aten
SOURCE, SINK = "saved", "needed"
REDUCTION_SHARE = 0.25  # what repeating a fused reduction costs, of saving its result: it reads values in a cache
TICK_SECONDS = 1e-12  # the unit of capacities, and the price of a byte among cheap values
Seconds = Callable[[fx.Node], float]  # of recomputing a node; inf: it must be saved


@dataclass(frozen=True)
class RecomputeCut:
    """Nodes of a block to recompute (``again``), the seconds that takes, and the bytes that are saved instead."""

    again: frozenset[fx.Node]
    seconds: float
    bytes: int


def groups_of(program: DifferentiatedProgram, inside: set[fx.Node]) -> Mapping[tuple[int, Block | None], list[fx.Node]]:
    """Return ``inside`` by stage and repeated block (None: what is in no block), in the graph's order."""
    groups: dict[tuple[int, Block | None], list[fx.Node]] = defaultdict(list)
    for node in program.graph.nodes:
        if node in inside:
            groups[program.stage[node], block_of(node)].append(node)
    return groups


def cheap_values(program: DifferentiatedProgram, inside: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes of ``inside`` to recompute so that the fewest bytes are saved, no expensive ones among them.

    ``inside``: forward nodes that only their own block reads.
    """
    groups = groups_of(program, inside).values()
    price = {node: math.inf if _is_expensive(node) else 0.0 for node in inside}
    return {node for nodes in groups for node in cheapest_cut(nodes, price.__getitem__, TICK_SECONDS).again}


def fused_values(program: DifferentiatedProgram, inside: set[fx.Node]) -> set[fx.Node]:
    """Return the same, but only values that kernels of the backward compute beside their users.

    These are pointwise operators, views, and normalizations that are compiled as pointwise operators and reductions
    (``_log_softmax``). Matmuls are not fused with the operators that they read.
    """
    groups = groups_of(program, inside).values()
    backward = {n for n in program.graph.nodes if n.op == "call_function" and facts(n).phase == "backward"}
    available = {source for node in backward for source in node.all_input_nodes} - inside
    price = {node: _seconds_if_fused(node) for node in inside}
    return {node for nodes in groups for node in cheapest_cut(nodes, price.__getitem__, TICK_SECONDS, available).again}


def cheapest_cut(
    nodes: Sequence[fx.Node], seconds: Seconds, per_byte: float, available: Set[fx.Node] = frozenset()
) -> RecomputeCut:
    """Return the cheapest way to have in the backward the values that it reads of a block's ``nodes``.

    Recomputing a node costs ``seconds`` and its inputs, saving it ``per_byte``. ``available``: other values that the
    backward has anyway.

    The minimum cut between what is saved and what is needed, as AOTAutograd's partitioner finds one (for what Chen et
    al. 2016 ask for); a node on the side of the sink pays for being computed, too. A view is never saved itself.
    """
    import networkx as nx  # slow to import, and few plans recompute

    network = _Network(nx.DiGraph(), nodes, seconds, per_byte, available)
    if network.graph.in_degree(SINK) == 0:
        return RecomputeCut(frozenset(), 0.0, 0)
    _, (source_side, sink_side) = nx.minimum_cut(
        network.graph, SOURCE, SINK, flow_func=nx.algorithms.flow.boykov_kolmogorov
    )
    again = frozenset(node for node in nodes if (node, "in") in sink_side)
    saved = {node for node, side in (source_side - {SOURCE}) if side == "in" and (node, "out") in sink_side}
    return RecomputeCut(again, sum(seconds(node) for node in again), sum(map(_bytes, saved)))


class _Network:
    """A flow network in which each node is an edge from its input to its output, with the price of saving it."""

    def __init__(
        self, empty: Any, nodes: Sequence[fx.Node], seconds: Seconds, per_byte: float, available: Set[fx.Node]
    ) -> None:
        self.per_byte, self.graph = per_byte, empty
        self.graph.add_nodes_from([SOURCE, SINK])
        inside = set(nodes)
        for node in nodes:
            never_saved = _is_tuple(node) or memory_of(node) is not node
            self._add_edge((node, "in"), (node, "out"), math.inf if never_saved else per_byte * _bytes(node))
            self._add_edge(SOURCE, (node, "in"), seconds(node))
            for source in node.all_input_nodes:
                if source in inside:
                    self.graph.add_edge((source, "out"), (node, "in"))
                elif leaf(source) is None and source not in available:  # leaves are always available
                    self._add_outer_input(source, node)
            if any(facts(user).phase == "backward" for user in node.users if user.op == "call_function"):
                self.graph.add_edge((node, "out"), SINK)

    def _add_outer_input(self, source: fx.Node, node: fx.Node) -> None:
        """Add a value of another block that recomputing ``node`` needs."""
        self._add_edge((source, "in"), (source, "out"), self.per_byte * _bytes(source))
        self.graph.add_edge(SOURCE, (source, "in"))
        self.graph.add_edge((source, "out"), (node, "in"))

    def _add_edge(self, start: object, end: object, price: float) -> None:
        if math.isinf(price):
            self.graph.add_edge(start, end)  # unlimited capacity
        elif price > 0:
            self.graph.add_edge(start, end, capacity=round(price / TICK_SECONDS))


def _is_expensive(node: fx.Node) -> bool:
    operator = origin(node)[0]
    return op_spec(operator).communicates or takes_long(operator)


def _seconds_if_fused(node: fx.Node) -> float:
    """Return the price of recomputing a value in kernels of the backward; inf if it would be written to memory."""
    if _is_view(node):
        return 0.0
    if _read_from_memory(node):
        return math.inf
    if spec_of(origin(node)[0].target).fused_as == "reduction":
        return REDUCTION_SHARE * TICK_SECONDS * _bytes(node)
    return 0.0 if _is_fused(node, torch.Tag.pointwise) else math.inf


def _read_from_memory(node: fx.Node) -> bool:
    """Return whether the backward reads a value by an operator that is not fused with it."""
    users = [user for user in node.users if user.op == "call_function"]
    if any(_is_view(user) and _read_from_memory(user) for user in users):
        return True
    readers = [user for user in users if not _is_view(user) and facts(user).phase == "backward"]
    return not all(_is_fused(user, torch.Tag.pointwise, torch.Tag.reduction) for user in readers)


def _is_view(node: fx.Node) -> bool:
    return memory_of(node) is not node


def _is_fused(node: fx.Node, *tags: torch.Tag) -> bool:
    """Return whether compilers fuse a node's operator: it has one of ``tags``, or consists of such operators."""
    operator = origin(node)[0].target
    return spec_of(operator).fused_as is not None or not set(tags).isdisjoint(getattr(operator, "tags", ()))


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(facts(node).value, tuple)


def _bytes(node: fx.Node) -> int:
    return 1 + sum(num_bytes(x) for x in values(node) if isinstance(x, torch.Tensor))
