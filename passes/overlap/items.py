"""What an order of a function consists of: nodes, and beginnings of those that run beside others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

from ...core.annotations import is_getitem
from ...ops.collectives import STARTS

Seconds = Callable[[fx.Node], float]
MARGIN = 2.0  # prices are estimates: what is to hide a collective may take so many times as long


@dataclass(frozen=True)
class Start:
    """The beginning of a collective, or of a copy; the node itself then is its end."""

    node: fx.Node


Item = fx.Node | Start


def node_of(item: Item) -> fx.Node:
    return item.node if isinstance(item, Start) else item


def source_of(node: fx.Node) -> fx.Node:
    """The collective of whose results ``node`` is one; else itself."""
    made = node.args[0] if is_getitem(node) else node
    return made if isinstance(made, fx.Node) and made.target in STARTS else node
