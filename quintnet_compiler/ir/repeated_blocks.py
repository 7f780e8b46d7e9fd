"""Which nodes of a graph do the same thing in repeated blocks (``layers.0``, ``layers.1``, ...)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Mapping

from torch import fx

from ..core.annotations import facts, leaf, needs_grad, tensor_inputs, values

Block = tuple[str, str]  # ("layers.", "3")
_BLOCK = re.compile(r"^((?:[^.\d][^.]*\.)*?)(\d+)(?:\.(.*))?$")


def _block(path: str) -> tuple[str, str, str] | None:
    """("layers.", "3", "attn.q") of ``layers.3.attn.q``: split at the first number."""
    match = _BLOCK.match(path)
    return (match[1], match[2], match[3] or "") if match else None


def as_block(path: str) -> Block:
    """("model.layers.", "3") of the path of a block, ``model.layers.3``."""
    parent, _, number = path.rpartition(".")
    return f"{parent}." if parent else "", number


def block_of(node: fx.Node) -> Block | None:
    """The repeated block that a node's module is in."""
    found = leaf(node)
    path = found.name if found and found.kind != "input" else facts(node).where.module
    split = _block(path)
    return split[:2] if split else None


def block_members(graph: fx.Graph) -> dict[Block, list[fx.Node]]:
    """The nodes of each repeated block in graph order, with the operators of no block that follow it up to the next one
    (``x = x + block(x)``); the last of a kind has as many of those as the one before it, if they are the same."""
    home = {node: block for node in graph.nodes if node.op != "output" and (block := block_of(node))}
    after: dict[Block, list[fx.Node]] = {}
    current: Block | None = None
    broken: set[Block] = set()  # blocks in whose midst others run
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        block = home.get(node)
        if block is None:
            if current:
                after[current].append(node)
        elif block != current:
            broken |= {block} if block in after else set()
            current = block
            after.setdefault(block, [])
    order = list(after)
    for index, block in enumerate(order):
        following = after[block]
        if index + 1 == len(order) or order[index + 1][0] != block[0]:  # what follows the last is the model's own
            before = after[order[index - 1]] if index and order[index - 1][0] == block[0] else []
            following = following[: len(before)]
            if [_signature(n) for n in following] != [_signature(n) for n in before]:
                following = []
        if block not in broken:
            home.update(dict.fromkeys(following, block))
    found: dict[Block, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node in home:
            found[home[node]].append(node)
    return found


def same_in_every_block(graph: fx.Graph, marks: Mapping[str, Hashable]) -> dict[fx.Node, Hashable]:
    """A key for each node; nodes with equal keys play the same part in blocks that are equal operator by operator, and
    whose leaves have equal ``marks`` (what a plan says of them, by name).

    Nodes outside blocks, and blocks that differ from every other, have keys of their own.
    """
    keys: dict[fx.Node, Hashable] = {node: node.name for node in graph.nodes}
    for (prefix, _), nodes in block_members(graph).items():
        said = tuple(marks.get(found.name) for node in nodes if (found := leaf(node)))
        signature = (tuple(_signature(node) for node in nodes), said)
        for position, node in enumerate(nodes):
            keys[node] = (prefix, hash(signature), position)
    return keys


def _signature(node: fx.Node) -> tuple[Hashable, ...]:
    shapes = tuple((tuple(v.shape), v.dtype) for v in values(node))
    found = leaf(node)
    split = _block(found.name) if found else None
    literals = tuple(repr(a) for a in node.args if not isinstance(a, (fx.Node, list, tuple)))
    given = tuple((tuple(v.shape), needs_grad(n)) for n in tensor_inputs(node) for v in values(n))
    name = split[2] if split else ""
    return (
        str(node.target) if node.op == "call_function" else node.op,
        shapes,
        name,
        literals,
        given,
        needs_grad(node),
    )
