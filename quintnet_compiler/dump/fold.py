"""Runs of equal blocks, shown once: a model of 126 layers reads like one of three."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..capture.repetition import longest_repetition
from ..ir.repeated_blocks import Block

T = TypeVar("T")


@dataclass(frozen=True)
class FoldedUnit(Generic[T]):
    """Items that belong together: those of a repeated block (``title`` is its path), or of what is between blocks.

    ``same``: the paths of blocks that have equal items, and are left out.
    """

    title: str
    items: tuple[T, ...]
    same: tuple[str, ...] = ()

    @property
    def rest(self) -> str:
        """Which blocks are left out, for people."""
        first, last = self.same[0], self.same[-1]
        return first if first == last else f"{first} to {last}"


def fold(items: Sequence[T], block: Callable[[T], Block | None], label: Callable[[T], Hashable]) -> list[FoldedUnit[T]]:
    """Cut ``items`` where their block changes, and keep one of each run of units with equal labels.

    >>> units = fold("a0 b1 b2 b3 b4 c9".split(), lambda x: ("b", x[1]) if x[0] == "b" else None, lambda x: x[0])
    >>> [(unit.title, unit.items, unit.same) for unit in units]
    [('', ('a0',), ()), ('b1', ('b1',), ('b2', 'b3', 'b4')), ('', ('c9',), ())]
    """
    runs: list[tuple[Block | None, list[T]]] = []
    for item in items:
        home = block(item)
        if not runs or runs[-1][0] != home:
            runs.append((home, []))
        runs[-1][1].append(item)
    known: dict[Hashable, int] = {}
    labels = []
    for home, members in runs:
        key = (home and home[0], tuple(label(item) for item in members))
        labels.append(known.setdefault(key, len(known)))
    found: list[FoldedUnit[T]] = []
    at = 0
    while at < len(runs):
        period, times = longest_repetition(labels, at)
        if times == 1 and runs[at][0]:
            times = next((i for i in range(1, len(runs) - at) if labels[at + i] != labels[at]), len(runs) - at)
        blocks = [home for home, _ in runs[at + period : at + period * times] if home]
        inside = tuple(item for _, members in runs[at : at + period] for item in members)
        title = next((home for home, _ in runs[at : at + period] if home), None)
        found.append(FoldedUnit("".join(title or ()), inside, tuple(dict.fromkeys("".join(home) for home in blocks))))
        at += period * times
    return found
