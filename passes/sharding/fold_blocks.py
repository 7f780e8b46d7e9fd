"""Program -> Folded: keep the first, the last and one middle block of each run of repeated blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from torch import fx

from ...ir.program import Program
from ...ir.repeated_blocks import Block, as_block, block_members, longest_repetition, same_in_every_block


@dataclass(frozen=True)
class Folded:
    """A program with few blocks, which stand for those of the whole program.

    Attributes:
        repeats: how many nodes of the whole program a node stands for.
        blocks: for each remaining block, by prefix and number, the numbers of the blocks that it stands for.
        home: the block of each node that is in one.
    """

    program: Program
    repeats: Mapping[fx.Node, int]
    blocks: Mapping[Block, tuple[str, ...]]
    home: Mapping[fx.Node, Block]


Run = list[list[fx.Node]]  # the nodes of each of a run of equal units (blocks, or groups of alternating blocks)


@dataclass(frozen=True)
class FoldBlocks:
    """Keep three of each run of blocks that are equal, operator by operator, and wired alike.

    Before: embed, layers.0, layers.1, ..., layers.31, head
    After:  embed, layers.0, layers.1 (30 times), layers.31, head
    Ensures: sums over nodes, weighted with ``repeats``, do not change. Layouts that treat equal blocks alike are
    layouts of the whole program.

    Attributes:
        marks: the plan's constraints on leaves, by name; blocks with different ones are not equal.
    """

    marks: Mapping[str, Hashable] = field(default_factory=dict)

    def __call__(self, program: Program, /) -> Folded:
        graph = program.graph
        stands_in = _representatives(graph, self.marks)
        new = fx.Graph()
        copied: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            representative = stands_in.get(node)
            if representative is None:
                copied[node] = new.node_copy(node, copied.__getitem__)
            else:
                copied[node] = copied[representative]
        home = _blocks_of_nodes(graph)
        blocks = _represented_blocks(program, home, stands_in)
        remaining = [node for node in graph.nodes if node not in stands_in]
        return Folded(
            replace(program, graph=new),
            {copied[node]: len(blocks[home[node]]) if node in home else 1 for node in remaining},
            {block: tuple(numbers) for block, numbers in blocks.items()},
            {copied[node]: home[node] for node in remaining if node in home},
        )


def _representatives(graph: fx.Graph, marks: Mapping[str, Hashable]) -> dict[fx.Node, fx.Node]:
    """Return the node of the second unit that stands for each node of later units, but for the last unit's."""
    representatives: dict[fx.Node, fx.Node] = {}
    for run in _runs(graph, marks):
        if len(run) > 3 and _wired_alike(run):
            for unit in run[2:-1]:
                representatives.update(zip(unit, run[1], strict=True))
    return representatives


def _represented_blocks(
    program: Program, home: Mapping[fx.Node, Block], stands_in: Mapping[fx.Node, fx.Node]
) -> dict[Block, dict[str, None]]:
    """Return the numbers of the blocks for which each remaining block stands, those that capture left out too."""
    left_out = {
        as_block(name): [as_block(other)[1] for other in names] for name, names in program.captured.like.items()
    }
    blocks: dict[Block, dict[str, None]] = defaultdict(dict)
    for node, block in home.items():
        numbers = [block[1], *left_out.get(block, ())]
        blocks[home[stands_in.get(node, node)]].update(dict.fromkeys(numbers))
    return blocks


def _blocks_of_nodes(graph: fx.Graph) -> dict[fx.Node, Block]:
    return {node: block for block, nodes in block_members(graph).items() for node in nodes}


def _runs(graph: fx.Graph, marks: Mapping[str, Hashable]) -> list[Run]:
    """Return runs of equal units, in the order of their first operators. A unit is as many blocks as alternate."""
    keys, members = same_in_every_block(graph, marks), block_members(graph)
    home = _blocks_of_nodes(graph)
    by_prefix: dict[str, dict[Block, None]] = defaultdict(dict)
    for node in graph.nodes:
        if node.op == "call_function" and node in home:
            by_prefix[home[node][0]][home[node]] = None
    runs: list[Run] = []
    for blocks in map(list, by_prefix.values()):
        labels = [tuple(keys[node] for node in members[block]) for block in blocks]
        start = 0
        while start < len(blocks):
            period, count = longest_repetition(labels, start)
            units = [blocks[start + i * period : start + (i + 1) * period] for i in range(count)]
            runs.append([[node for block in unit for node in members[block]] for unit in units])
            start += period * count
    return runs


def _wired_alike(run: Run) -> bool:
    """Return whether every unit after the first reads the same of its predecessor and of the rest of the graph.

    No node outside may read a unit but the last.
    """
    positions = {node: (index, position) for index, unit in enumerate(run) for position, node in enumerate(unit)}
    last = len(run) - 1

    def reads(index: int) -> list[tuple[object, ...]]:
        sources: list[tuple[object, ...]] = []
        for node in run[index]:
            for source in node.all_input_nodes:
                unit, position = positions.get(source, (None, source))
                sources.append((None if unit is None else index - unit, position))
        return sources

    if any(a != b for a, b in pairwise(reads(index) for index in range(1, len(run)))):
        return False
    return all(
        positions.get(user, (last + 1,))[0] in (index, index + 1)
        for index, unit in enumerate(run[:last])
        for node in unit
        for user in node.users
    )
