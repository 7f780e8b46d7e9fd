"""Which nodes of a graph do the same thing in repeated blocks (``layers.0``, ``layers.1``, ...)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable

from torch import fx

from ..annotations import facts, leaf, needs_grad, tensor_inputs, values

_BLOCK = re.compile(r"^((?:[^.\d][^.]*\.)*?)(\d+)(?:\.(.*))?$")


def _block(path: str) -> tuple[str, str, str] | None:
    """("layers", "3", "attn.q") of ``layers.3.attn.q``: split at the first number."""
    match = _BLOCK.match(path)
    return (match[1], match[2], match[3] or "") if match else None


def block_of(node: fx.Node) -> tuple[str, str] | None:
    """The repeated block that a node belongs to: ("layers.", "3")."""
    found = leaf(node)
    path = found.name if found and found.kind != "input" else facts(node).where.module
    split = _block(path)
    return split[:2] if split else None


def same_in_every_block(graph: fx.Graph) -> dict[fx.Node, Hashable]:
    """A key for each node; nodes with equal keys play the same part in blocks that are equal operator by operator.

    Nodes outside blocks, and blocks that differ from every other, have keys of their own.
    """
    members: dict[tuple[str, str], list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        block = block_of(node) if node.op != "output" else None
        if block:
            members[block].append(node)
    keys: dict[fx.Node, Hashable] = {node: node.name for node in graph.nodes}
    for (prefix, _), nodes in members.items():
        signature = tuple(_signature(node) for node in nodes)
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
