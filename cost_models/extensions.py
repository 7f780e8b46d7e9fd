"""Prices that features declare for their operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import fx

ProductSize = tuple[int, int, int, int]  # batch, rows, columns, depth: a multiply-add for each of their product


@dataclass(frozen=True)
class SizeOfProduct:
    """The size of an operator that is priced as a product, and has no rule that says it.

    Attributes:
        size: takes the node of a rank's graph.
    """

    size: Callable[[fx.Node], ProductSize]
