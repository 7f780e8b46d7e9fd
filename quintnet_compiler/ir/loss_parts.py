"""A loss as a function of sums and means over the rows of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import SymBool, SymFloat, SymInt, fx

Kind = Literal["sum", "mean", "fixed", "additive size", "fixed size"]


@dataclass(frozen=True)
class LossPart:
    """A value from which a loss is computed.

    Attributes:
        name: what it is, for people.
        kind: ``sum`` and ``mean`` over rows; ``fixed``: the same for all batches, such as a function of parameters; the
            sizes are numbers that the code computes from shapes.
        output: the index of the program's result that has it; None for sizes.
        count: the number of elements of a mean, if that is a size.
        count_output: the index of the program's result that has that number, if it depends on values.
        size: for sizes, the number itself.
    """

    name: str
    kind: Kind
    output: int | None = None
    count: Any = None
    count_output: int | None = None
    size: Any = None


@dataclass(frozen=True)
class LossParts:
    """The parts of a loss.

    Attributes:
        parts: the values from which the loss is computed.
        combine: a graph with a placeholder for each part that returns the loss.
        symbols: the names of sizes in a batch's form, by symbol.
    """

    parts: tuple[LossPart, ...]
    combine: fx.GraphModule
    symbols: Mapping[str, str]


def number_at(size: Any, sizes: Mapping[str, int], symbols: Mapping[str, str]) -> float:
    """Return the value of an expression of sizes for a batch of these ``sizes`` (by name)."""
    if not hasattr(size, "node"):
        return float(size)
    expression = size.node.expr
    return float(expression.subs({symbol: sizes[symbols[str(symbol)]] for symbol in expression.free_symbols}))


def depends_on(size: Any, symbol: str) -> bool:
    """Return whether an expression of sizes has this symbol."""
    symbolic = isinstance(size, (SymInt, SymFloat, SymBool))
    return symbolic and any(str(each) == symbol for each in size.node.expr.free_symbols)


def is_multiple_of(size: Any, symbol: str) -> bool:
    """Return whether an expression of sizes is a factor times this symbol, by its values for some numbers."""
    expression = size.node.expr

    def value(number: int, other: int) -> float:
        return float(
            expression.subs({each: number if str(each) == symbol else other for each in expression.free_symbols})
        )

    return all(value(n, other) == n * value(1, other) for n in (2, 3, 5, 8, 13) for other in (7, 10))
