"""Program -> Folded: of a run of repeated blocks, the first, the last, and one that stands for those between."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from torch import fx

from ...capture.repetition import longest_repetition
from ...ir.program import Program
from ...ir.repeated_blocks import Block, as_block, block_members, same_in_every_block


@dataclass(frozen=True)
class Folded:
    """``program`` with few blocks; ``repeats[node]``: how many nodes of the whole program it stands for.

    ``blocks``: for each block that is left, by prefix and number, the numbers of the blocks that it stands for.
    ``home``: the block of each node that is in one.
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
    Ensures: whatever is added up over nodes, weighted with ``repeats``, is what it was. Layouts that treat equal
    blocks alike are layouts of the whole program.

    ``marks``: what a plan says of leaves, by name; blocks of which it says different things are not equal.
    """

    marks: Mapping[str, Hashable] = field(default_factory=dict)

    def __call__(self, program: Program, /) -> Folded:
        graph = program.graph
        stands_for: dict[fx.Node, fx.Node] = {}
        for run in _runs(graph, self.marks):
            if len(run) > 3 and _alike(run):
                for unit in run[2:-1]:
                    stands_for.update(zip(unit, run[1], strict=True))
        new = fx.Graph()
        copied: dict[fx.Node, fx.Node] = {}
        for node in graph.nodes:
            twin = stands_for.get(node)
            copied[node] = new.node_copy(node, copied.__getitem__) if twin is None else copied[twin]
        home = {node: block for block, nodes in block_members(graph).items() for node in nodes}
        left_out = program.captured.like.items()
        like = {as_block(name): [as_block(other)[1] for other in names] for name, names in left_out}
        blocks: dict[Block, dict[str, None]] = defaultdict(dict)
        for node, block in home.items():
            numbers = [block[1], *like.get(block, ())]
            blocks[home[stands_for.get(node, node)]].update(dict.fromkeys(numbers))
        kept = [node for node in graph.nodes if node not in stands_for]
        return Folded(
            replace(program, graph=new),
            {copied[node]: len(blocks[home[node]]) if node in home else 1 for node in kept},
            {block: tuple(numbers) for block, numbers in blocks.items()},
            {copied[node]: home[node] for node in kept if node in home},
        )


def _runs(graph: fx.Graph, marks: Mapping[str, Hashable]) -> list[Run]:
    """Runs of equal units, each as many blocks long as alternate; blocks in the order of their first operators."""
    keys, members = same_in_every_block(graph, marks), block_members(graph)
    home = {node: block for block, nodes in members.items() for node in nodes}
    by_prefix: dict[str, dict[Block, None]] = defaultdict(dict)
    for node in graph.nodes:
        if node.op == "call_function" and node in home:
            by_prefix[home[node][0]][home[node]] = None
    found: list[Run] = []
    for blocks in map(list, by_prefix.values()):
        labels = [tuple(keys[node] for node in members[block]) for block in blocks]
        at = 0
        while at < len(blocks):
            period, times = longest_repetition(labels, at)
            units = [blocks[at + i * period : at + (i + 1) * period] for i in range(times)]
            found.append([[node for block in unit for node in members[block]] for unit in units])
            at += period * times
    return found


def _alike(run: Run) -> bool:
    """Whether every unit after the first reads the same of the one before it and of the rest of the graph, and nobody
    else reads any but the last."""
    place = {node: (index, position) for index, unit in enumerate(run) for position, node in enumerate(unit)}
    last = len(run) - 1

    def reads(index: int) -> list[tuple[object, ...]]:
        found: list[tuple[object, ...]] = []
        for node in run[index]:
            for source in node.all_input_nodes:
                unit, position = place.get(source, (None, source))
                found.append((None if unit is None else index - unit, position))
        return found

    wired = all(a == b for a, b in pairwise(reads(index) for index in range(1, len(run))))
    return wired and all(
        place.get(user, (last + 1,))[0] in (index, index + 1)
        for index, unit in enumerate(run[:last])
        for node in unit
        for user in node.users
    )
