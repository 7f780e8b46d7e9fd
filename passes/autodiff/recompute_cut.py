"""What of a block the backward makes again, as a cut of the block's graph."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

import lazy_loader
import torch
from torch import fx

from ...core.annotations import facts, leaf, memory_of, num_bytes, origin, values
from ...ir.program import DifferentiatedProgram
from ...ir.repeated_blocks import Block, block_of
from ...ops.catalog import facts_of, work_of
from ...ops.collectives import COMMUNICATION

aten = torch.ops.aten
nx = lazy_loader.load("networkx")  # slow to import, and few plans recompute
SOURCE, SINK = "kept", "wanted"
TICK = 1e-12  # seconds: what the cut counts in, and what cheap values pay for a byte
Seconds = Callable[[fx.Node], float]  # of making a node again; inf: it must not be


@dataclass(frozen=True)
class RecomputeCut:
    """Nodes of a block that are made ``again``, what that takes, and the bytes that are kept instead."""

    again: frozenset[fx.Node]
    seconds: float
    bytes: int


def groups_of(program: DifferentiatedProgram, inside: set[fx.Node]) -> Mapping[tuple[int, Block], list[fx.Node]]:
    """``inside`` by stage and repeated block, in the graph's order."""
    found: dict[tuple[int, Block], list[fx.Node]] = defaultdict(list)
    for node in program.graph.nodes:
        if node in inside and (block := block_of(node)) is not None:
            found[program.stage[node], block].append(node)
    return found


def cheap_values(program: DifferentiatedProgram, inside: set[fx.Node]) -> set[fx.Node]:
    """Those of ``inside`` (forward nodes read in their own block only) that a backward makes again, nothing dear among
    them, so that the fewest bytes are kept."""
    groups = groups_of(program, inside).values()
    return {node for nodes in groups for node in cut(nodes, lambda n: math.inf if _dear(n) else 0.0, TICK).again}


def fused_values(program: DifferentiatedProgram, inside: set[fx.Node]) -> set[fx.Node]:
    """The same, but only of pointwise operators and views that the backward's kernels can make themselves, because what
    reads them is fused with them: no matmul does."""
    groups = groups_of(program, inside).values()
    read = {n for n in program.graph.nodes if n.op == "call_function" and facts(n).phase == "backward"}
    held = {source for node in read for source in node.all_input_nodes} - inside
    price = {node: math.inf if _in_memory(node) else 0.0 for node in inside}
    return {node for nodes in groups for node in cut(nodes, price.__getitem__, TICK, held).again}


def cut(nodes: Sequence[fx.Node], seconds: Seconds, per_byte: float, held: Set[fx.Node] = frozenset()) -> RecomputeCut:
    """What is cheapest of all ways to have in the backward what it reads of a block's ``nodes``: making a node again
    costs ``seconds`` and its inputs, keeping one ``per_byte``.

    A minimum cut between what is there and what is wanted, as AOTAutograd's partitioner finds one (for what Chen et al.
    2016 ask for); a node that is behind the cut pays for being made, too. A view is never kept for itself. ``held``:
    what else the backward has anyway.
    """
    mine, graph = set(nodes), nx.DiGraph()
    graph.add_nodes_from([SOURCE, SINK])

    def pay(start: object, end: object, price: float) -> None:
        if math.isinf(price):
            graph.add_edge(start, end)
        elif price > 0:
            graph.add_edge(start, end, capacity=round(price / TICK))

    for node in nodes:
        pay(
            (node, "in"),
            (node, "out"),
            math.inf if _several(node) or memory_of(node) is not node else per_byte * _bytes(node),
        )
        pay(SOURCE, (node, "in"), seconds(node))
        for source in node.all_input_nodes:
            if source in mine:
                graph.add_edge((source, "out"), (node, "in"))
            elif leaf(source) is None and source not in held:  # parameters, buffers and the batch are there anyway
                pay((source, "in"), (source, "out"), per_byte * _bytes(source))
                graph.add_edge(SOURCE, (source, "in"))
                graph.add_edge((source, "out"), (node, "in"))
        if any(facts(user).phase == "backward" for user in node.users if user.op == "call_function"):
            graph.add_edge((node, "out"), SINK)
    if graph.in_degree(SINK) == 0:
        return RecomputeCut(frozenset(), 0.0, 0)
    _, (before, after) = nx.minimum_cut(graph, SOURCE, SINK, flow_func=nx.algorithms.flow.boykov_kolmogorov)
    again = frozenset(node for node in nodes if (node, "in") in after)
    kept = {node for node, side in (before - {SOURCE}) if side == "in" and (node, "out") in after}
    return RecomputeCut(again, sum(seconds(node) for node in again), sum(map(_bytes, kept)))


def takes_long(node: fx.Node) -> bool:
    """Whether this is more than a pass over memory, on this rank: a matmul, attention, sorting."""
    fused = work_of(node.target) == "attention" and node.target not in COMMUNICATION
    return fused or facts_of(node.target).keep


def _dear(node: fx.Node) -> bool:
    made = origin(node)[0]
    return made.target in COMMUNICATION or takes_long(made)


def _in_memory(node: fx.Node) -> bool:
    """Whether a value, made in the backward again, would have to be written to memory there."""
    return not _view(node) and (not _tagged(node, torch.Tag.pointwise) or _read_from_memory(node))


def _read_from_memory(node: fx.Node) -> bool:
    """Whether the backward reads a value by an operator that is not fused with the one that makes it."""
    users = [user for user in node.users if user.op == "call_function"]
    if any(_view(user) and _read_from_memory(user) for user in users):
        return True
    readers = [user for user in users if not _view(user) and facts(user).phase == "backward"]
    return not all(_tagged(user, torch.Tag.pointwise, torch.Tag.reduction) for user in readers)


def _view(node: fx.Node) -> bool:
    return memory_of(node) is not node


def _tagged(node: fx.Node, *tags: torch.Tag) -> bool:
    return not set(tags).isdisjoint(getattr(origin(node)[0].target, "tags", ()))


def _several(node: fx.Node) -> bool:
    return isinstance(facts(node).value, tuple)


def _bytes(node: fx.Node) -> int:
    return 1 + sum(num_bytes(x) for x in values(node) if isinstance(x, torch.Tensor))
