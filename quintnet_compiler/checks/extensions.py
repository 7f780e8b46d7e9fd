"""Checks that features declare for their operators: that the nodes of a rank compute what the operator does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..ir.program import Axis, Strategy
from .derivatives.calls import Pattern


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


@dataclass(frozen=True)
class ExpertCopiesCheck:
    """Check what one rank contributes to copies of experts, which ranks add up.

    Attributes:
        holds: takes the node, the local node of the experts that the rank stores, the numbers of the experts with
            copies, and the axes that split experts; returns whether the node has those that the rank stores, and zeros
            for the others.
    """

    holds: Callable[[fx.Node, fx.Node, Sequence[int], Sequence[Axis]], bool]


@dataclass(frozen=True)
class ExpectedGradients:
    """Say which calls must stand for the gradients of an operator that depends on the rank.

    Attributes:
        calls: takes the arguments, and the pattern of forward and backward; returns, by the position of an input, the
            operator and the arguments of its gradient.
    """

    calls: Callable[[Sequence[Any], Pattern], Mapping[int, tuple[Any, Any]]]
