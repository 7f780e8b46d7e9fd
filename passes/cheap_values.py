"""Which values of a block to compute again in the backward, so that the fewest bytes are kept: a minimum cut."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import networkx as nx
import torch
from torch import fx

from ..annotations import facts, leaf, num_bytes, origin, values
from ..comm_ops import COMMUNICATION
from ..expert_ops import expert_linear
from ..program import DifferentiatedProgram
from .repeated_blocks import Block, block_of

aten = torch.ops.aten
SOURCE, SINK = "kept", "wanted"
# What takes more than a pass over memory: products, attention, sorting; and what other ranks take part in.
_DEAR = frozenset(
    {
        aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten.linear.default,
        aten.matmul.default, aten.convolution.default, aten.einsum.default, aten._grouped_mm.default, expert_linear,
        aten.sort.default, aten.topk.default, aten.cumsum.default,
    }
)  # fmt: skip


def cheap_values(program: DifferentiatedProgram, inside: set[fx.Node]) -> set[fx.Node]:
    """Those of ``inside`` (forward nodes read in their own block only) that a backward makes again.

    Nothing dear is made again. Of all ways to have what the backward reads, the one that keeps the fewest bytes: a cut
    between what cannot be made again and what is wanted (as Chen et al. 2016 ask for, found as in AOTAutograd's
    partitioner; Boykov and Kolmogorov's flow).
    """
    blocks: dict[Block, list[fx.Node]] = defaultdict(list)
    for node in program.graph.nodes:
        if node in inside and (block := block_of(node)) is not None:
            blocks[block].append(node)
    return {node for nodes in blocks.values() for node in _of_block(nodes)}


def _dear(node: fx.Node) -> bool:
    made = origin(node)[0]
    return made.target in _DEAR or made.target in COMMUNICATION or "attention" in str(made.target)


def _of_block(nodes: list[fx.Node]) -> Iterable[fx.Node]:
    mine = set(nodes)
    graph = nx.DiGraph()
    graph.add_nodes_from([SOURCE, SINK])
    for node in nodes:
        # what has several results is kept by them
        graph.add_edge((node, "in"), (node, "out"), **({} if _several(node) else {"capacity": _bytes(node)}))
        if _dear(node):
            graph.add_edge(SOURCE, (node, "in"))
        else:
            for source in node.all_input_nodes:
                if source in mine:
                    graph.add_edge((source, "out"), (node, "in"))
                elif not _free(source):
                    graph.add_edge((source, "in"), (source, "out"), capacity=_bytes(source))
                    graph.add_edge(SOURCE, (source, "in"))
                    graph.add_edge((source, "out"), (node, "in"))
        if any(facts(user).phase == "backward" for user in node.users if user.op == "call_function"):
            graph.add_edge((node, "out"), SINK)
    if graph.in_degree(SINK) == 0 or graph.out_degree(SOURCE) == 0:
        return [node for node in nodes if not _dear(node)]
    _, (before, _) = nx.minimum_cut(graph, SOURCE, SINK, flow_func=nx.algorithms.flow.boykov_kolmogorov)
    kept = {node for node in nodes if (node, "in") in before and (node, "out") not in before}
    return [node for node in nodes if not _dear(node) and node not in kept]


def _several(node: fx.Node) -> bool:
    return isinstance(facts(node).value, tuple)


def _free(node: fx.Node) -> bool:
    """Parameters, buffers and the batch are there anyway."""
    return leaf(node) is not None


def _bytes(node: fx.Node) -> int:
    return 1 + sum(num_bytes(x) for x in values(node) if isinstance(x, torch.Tensor))
