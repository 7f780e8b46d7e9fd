"""Value numbering (Alpern, Wegman and Zadeck 1988): values that are made alike have one number, in any graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from torch import fx


@dataclass(frozen=True)
class NumberRead:
    """A value that a call reads, among its arguments."""

    number: Hashable


@dataclass(frozen=True)
class ValueNumbers:
    """Numbers of values, for all graphs that are compared."""

    known: dict[Hashable, int] = field(default_factory=dict)

    def number(self, *key: Hashable) -> int:
        """The same for an equal key.

        >>> numbers = ValueNumbers()
        >>> [numbers.number("leaf", name) for name in "xyx"]
        [0, 1, 0]
        """
        return self.known.setdefault(key, len(self.known))

    def call(self, place: Hashable, target: Any, given: Any, of: Callable[[fx.Node], Hashable]) -> int:
        """That of a call in ``place`` with the arguments ``given``; ``of``: the number of a node that is read."""
        return self.number("call", place, str(target), repr(fx.map_arg(given, lambda n: NumberRead(of(n)))))  # type: ignore[arg-type,return-value]
