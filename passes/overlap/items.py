"""Items of a function's order: nodes, and the starts of asynchronous nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from ...core.annotations import is_getitem, leaf
from ...ops.catalog import op_spec

aten = torch.ops.aten

Seconds = Callable[[fx.Node], float]
HIDING_MARGIN = 2.0  # of estimated computation to a collective that it hides


@dataclass(frozen=True)
class Start:
    """The start of a collective or of a copy; the node itself is then the wait."""

    node: fx.Node


Item = fx.Node | Start


def node_of(item: Item) -> fx.Node:
    """Return the node of an item."""
    return item.node if isinstance(item, Start) else item


def stored_in(node: fx.Node) -> fx.Node | None:
    """Return the parameter that ``node`` is or copies (from the host, or to another dtype) for gathers to read."""
    cast = op_spec(node).casts
    source = node.all_input_nodes[0] if cast else node
    source = source.all_input_nodes[0] if op_spec(source).way == "from host" else source
    source_leaf = leaf(source)
    return source if source_leaf is not None and (source_leaf.held is not None or not cast) else None


def source_of(node: fx.Node) -> fx.Node:
    """Return the collective whose result ``node`` is, or ``node``."""
    source = node.args[0] if is_getitem(node) else node
    return source if isinstance(source, fx.Node) and op_spec(source).start is not None else node
