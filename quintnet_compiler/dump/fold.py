"""Runs of equal blocks, shown once: a model of 126 layers reads like one of three."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..ir.repeated_blocks import Block, longest_repetition

T = TypeVar("T")


@dataclass(frozen=True)
class FoldedUnit(Generic[T]):
    """Items of a repeated block (``title`` is its path), or of what is between blocks.

    ``same``: the paths of blocks that have equal items, and are left out.
    """

    title: str
    items: tuple[T, ...]
    same: tuple[str, ...] = ()

    @property
    def rest(self) -> str:
        """Return which blocks are left out, for people."""
        first, last = self.same[0], self.same[-1]
        return first if first == last else f"{first} to {last}"


def fold(items: Sequence[T], block: Callable[[T], Block | None], label: Callable[[T], Hashable]) -> list[FoldedUnit[T]]:
    """Cut ``items`` where their block changes, and return one of each run of units with equal labels.

    >>> units = fold("a0 b1 b2 b3 b4 c9".split(), lambda x: ("b", x[1]) if x[0] == "b" else None, lambda x: x[0])
    >>> [(unit.title, unit.items, unit.same) for unit in units]
    [('', ('a0',), ()), ('b1', ('b1',), ('b2', 'b3', 'b4')), ('', ('c9',), ())]
    """
    runs = _runs(items, block)
    numbers: dict[Hashable, int] = {}
    labels = []
    for path, members in runs:
        key = (path and path[0], tuple(label(item) for item in members))
        labels.append(numbers.setdefault(key, len(numbers)))
    units: list[FoldedUnit[T]] = []
    start = 0
    while start < len(runs):
        period, times = longest_repetition(labels, start)
        if times == 1 and runs[start][0]:
            times = next((i for i, number in enumerate(labels[start:]) if number != labels[start]), len(runs) - start)
        end = start + period * times
        units.append(_unit(runs[start : start + period], runs[start + period : end]))
        start = end
    return units


_Run = tuple[Block | None, list[T]]


def _runs(items: Sequence[T], block: Callable[[T], Block | None]) -> list[_Run[T]]:
    """Return runs of items of one block."""
    runs: list[_Run[T]] = []
    for item in items:
        path = block(item)
        if not runs or runs[-1][0] != path:
            runs.append((path, []))
        runs[-1][1].append(item)
    return runs


def _unit(shown: Sequence[_Run[T]], repeated: Sequence[_Run[T]]) -> FoldedUnit[T]:
    """Return a unit of runs, which are shown once."""
    title = next((path for path, _ in shown if path), ())
    items = tuple(item for _, members in shown for item in members)
    return FoldedUnit("".join(title), items, tuple(dict.fromkeys("".join(path) for path, _ in repeated if path)))
