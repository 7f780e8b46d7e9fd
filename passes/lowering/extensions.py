"""Lowerings that features declare for their operators: the nodes that a rank runs for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ...core.sharding import Sharding
from ...ir.builder import GraphBuilder
from ...ir.program import Axis, Strategy


@dataclass(frozen=True)
class LocalForm:
    """Emit an operator that runs as something else on a rank than itself.

    Attributes:
        emit: takes the builder, the local arguments, the sharding of the first input, and the axes; returns the result.
    """

    emit: Callable[[GraphBuilder, Sequence[Any], Sharding, Sequence[Axis]], fx.Node]


@dataclass(frozen=True)
class ExpertProduct:
    """Emit the product of a layer of experts, on rows in the order of their experts, that is no plain grouped matmul.

    Attributes:
        emit: takes the builder, the axes, the layer's strategies, the end of each expert's rows, and the layer's
            arguments, with grouped rows for the rows and without the ids; returns the rows of the result.
    """

    emit: Callable[[GraphBuilder, Sequence[Axis], Sequence[Strategy], fx.Node, Sequence[Any]], fx.Node]
