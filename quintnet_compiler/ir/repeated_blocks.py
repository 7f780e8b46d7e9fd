"""Find repeated blocks (``layers.0``, ``layers.1``, ...), and nodes that do the same thing in them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

from torch import fx

from ..core.annotations import facts, leaf, needs_grad, tensor_inputs, values

Block = tuple[str, str]  # ("layers.", "3")
_BLOCK = re.compile(r"^((?:[^.\d][^.]*\.)*?)(\d+)(?:\.(.*))?$")


def _block(path: str) -> tuple[str, str, str] | None:
    """Split a path at its first number: ``layers.3.attn.q`` is ("layers.", "3", "attn.q")."""
    match = _BLOCK.match(path)
    return (match[1], match[2], match[3] or "") if match else None


def as_block(path: str) -> Block:
    """Split the path of a block: ``model.layers.3`` is ("model.layers.", "3")."""
    parent, _, number = path.rpartition(".")
    return f"{parent}." if parent else "", number


def block_of(node: fx.Node) -> Block | None:
    """Return the repeated block of a node's module, or None."""
    source = leaf(node)
    path = source.name if source and source.kind != "input" else facts(node).where.module
    split = _block(path)
    return split[:2] if split else None


def block_members(graph: fx.Graph) -> dict[Block, list[fx.Node]]:
    """Return the nodes of each repeated block in graph order.

    A block includes the operators of no block that follow it, up to the next block (``x = x + block(x)``). The last of
    a kind has as many of those as the block before it, if they are the same.
    """
    blocks = {node: block for node in graph.nodes if node.op != "output" and (block := block_of(node))}
    followers, interrupted = _followers(graph, blocks)
    order = list(followers)
    for index, block in enumerate(order):
        following = followers[block]
        is_last = index + 1 == len(order) or order[index + 1][0] != block[0]
        if is_last:  # the operators after it may be the model's own
            has_previous = index > 0 and order[index - 1][0] == block[0]
            following = _common_prefix(following, followers[order[index - 1]] if has_previous else [])
        if block not in interrupted:
            blocks.update(dict.fromkeys(following, block))
    members: dict[Block, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node in blocks:
            members[blocks[node]].append(node)
    return members


def _followers(graph: fx.Graph, blocks: Mapping[fx.Node, Block]) -> tuple[dict[Block, list[fx.Node]], set[Block]]:
    """Return the operators of no block that follow each block, and the blocks that other blocks interrupt."""
    followers: dict[Block, list[fx.Node]] = {}
    interrupted: set[Block] = set()
    current: Block | None = None
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        block = blocks.get(node)
        if block is None:
            if current:
                followers[current].append(node)
        elif block != current:
            if block in followers:
                interrupted.add(block)
            current = block
            followers.setdefault(block, [])
    return followers, interrupted


def _common_prefix(nodes: list[fx.Node], model: list[fx.Node]) -> list[fx.Node]:
    """Return the first of ``nodes``, as many as ``model`` has, if they are the same operators; else none."""
    prefix = nodes[: len(model)]
    same = [_signature(node) for node in prefix] == [_signature(node) for node in model]
    return prefix if same else []


def same_in_every_block(graph: fx.Graph, marks: Mapping[str, Hashable]) -> dict[fx.Node, Hashable]:
    """Return a key for each node; nodes with equal keys play the same part in equal blocks.

    Blocks are equal if they are so operator by operator, and their leaves have equal ``marks`` (the plan's decisions
    about them, by name). Nodes outside blocks, and blocks that differ from every other, have keys of their own.
    """
    keys: dict[fx.Node, Hashable] = {node: node.name for node in graph.nodes}
    for (prefix, _), nodes in block_members(graph).items():
        leaf_marks = tuple(marks.get(source.name) for node in nodes if (source := leaf(node)))
        signature = (tuple(_signature(node) for node in nodes), leaf_marks)
        for position, node in enumerate(nodes):
            keys[node] = (prefix, hash(signature), position)
    return keys


def _signature(node: fx.Node) -> tuple[Hashable, ...]:
    shapes = tuple((tuple(v.shape), v.dtype) for v in values(node))
    source = leaf(node)
    split = _block(source.name) if source else None
    literals = tuple(repr(a) for a in node.args if not isinstance(a, (fx.Node, list, tuple)))
    inputs = tuple((tuple(v.shape), needs_grad(n)) for n in tensor_inputs(node) for v in values(n))
    name = split[2] if split else ""
    return (
        str(node.target) if node.op == "call_function" else node.op,
        shapes,
        name,
        literals,
        inputs,
        needs_grad(node),
    )


def longest_repetition(labels: Sequence[Hashable], at: int) -> tuple[int, int]:
    """Return the period and count of the repetition from ``at`` that saves most if only three units remain.

    (1, 1) if nothing repeats more than three times.

    >>> longest_repetition("ABABABABABC", 0)
    (2, 5)
    """
    best, saved = (1, 1), 0
    for period in range(1, (len(labels) - at) // 4 + 1):
        unit, times = labels[at : at + period], 1
        while labels[at + times * period : at + (times + 1) * period] == unit:
            times += 1
        if (times - 3) * period > saved:
            best, saved = (period, times), (times - 3) * period
    return best
