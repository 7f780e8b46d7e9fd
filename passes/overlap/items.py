"""What an order of a function consists of: nodes, and beginnings of those that run beside others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from ...core.annotations import is_getitem, leaf
from ...ops.catalog import op_spec

aten = torch.ops.aten

Seconds = Callable[[fx.Node], float]
MARGIN = 2.0  # prices are estimates: what is to hide a collective may take so many times as long


@dataclass(frozen=True)
class Start:
    """The beginning of a collective, or of a copy; the node itself then is its end."""

    node: fx.Node


Item = fx.Node | Start


def node_of(item: Item) -> fx.Node:
    return item.node if isinstance(item, Start) else item


def stored_in(node: fx.Node) -> fx.Node | None:
    """The parameter that ``node`` is, or of which it is the copy that gathers read: from the host, in another dtype."""
    cast = op_spec(node).casts
    source = node.all_input_nodes[0] if cast else node
    source = source.all_input_nodes[0] if op_spec(source).way == "from host" else source
    found = leaf(source)
    return source if found is not None and (found.held is not None or not cast) else None


def source_of(node: fx.Node) -> fx.Node:
    """The collective of whose results ``node`` is one; else itself."""
    made = node.args[0] if is_getitem(node) else node
    return made if isinstance(made, fx.Node) and op_spec(made).start is not None else node
