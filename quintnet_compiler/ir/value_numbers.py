"""Value numbering (Alpern, Wegman and Zadeck 1988): equal computations have equal numbers, in any graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from torch import fx


@dataclass(frozen=True)
class NumberRead:
    """The number of a value that a call reads, in place of the node among its arguments."""

    number: Hashable


@dataclass(frozen=True)
class ValueNumbers:
    """Numbers of values, for all graphs that are compared."""

    known: dict[Hashable, int] = field(default_factory=dict)

    def number(self, *key: Hashable) -> int:
        """Return the number of ``key``: equal keys have equal numbers.

        >>> numbers = ValueNumbers()
        >>> [numbers.number("leaf", name) for name in "xyx"]
        [0, 1, 0]
        """
        return self.known.setdefault(key, len(self.known))

    def call(self, place: Hashable, target: Any, arguments: Any, number_of: Callable[[fx.Node], Hashable]) -> int:
        """Return the number of a call in ``place``; ``number_of`` returns the number of a node that it reads."""
        numbered = fx.map_arg(arguments, lambda node: NumberRead(number_of(node)))  # type: ignore[arg-type,return-value]
        return self.number("call", place, str(target), repr(numbered))
