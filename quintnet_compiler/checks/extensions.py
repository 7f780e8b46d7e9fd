"""Checks that features declare for their operators: that the nodes of a rank compute what the operator does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from ..ir.program import Axis, Strategy


class LayerError(Exception):
    """A part of what stands for an operator on ranks is not what the operator needs; the message names it."""


@dataclass(frozen=True)
class LocalFormCheck:
    """Check the nodes that stand for an operator on a rank.

    Attributes:
        check: takes the operator's node, the local node of its result, and the names of the axes over which ranks have
            parts of what it reads. Raises LayerError.
    """

    check: Callable[[fx.Node, fx.Node, Sequence[str]], None]


@dataclass(frozen=True)
class ExpertProductCheck:
    """Read the product of a layer of experts that is no plain grouped matmul.

    Attributes:
        read: takes the layer's node, the local nodes of its weights, the axes, the layer's strategies, and the local
            product; returns the rows that it multiplies, and the node with the end of each expert's rows. Raises
            LayerError.
    """

    read: Callable[[fx.Node, Sequence[fx.Node], Sequence[Axis], Sequence[Strategy], fx.Node], tuple[fx.Node, fx.Node]]
