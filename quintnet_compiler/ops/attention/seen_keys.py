"""How many keys queries see, by their positions and by the lengths of the documents that rows are expected to hold."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from .blocks import Sight
from .ids import FEW
from .ring_plan import assign_runs, positions_of

MOST_ROWS = 256  # of documents that go on and on
Runs = Sequence[tuple[int, int]]  # first position and length of each


@dataclass(frozen=True)
class SeenRow:
    """A row of ``length`` positions, at whose ``ends`` documents end (the last one with the row). As FLOP of attention
    are counted, a query sees half of itself where later keys are hidden: causal attention is half of all pairs."""

    sight: Sight
    length: int
    ends: tuple[int, ...]

    @cached_property
    def _cuts(self) -> list[int]:
        """Where what sees each other ends: documents, cut into chunks."""
        chunk = self.sight.chunk
        return sorted({*self.ends, *(range(chunk, self.length, chunk) if chunk else ())})

    @cached_property
    def _before(self) -> list[float]:
        """Pairs of a query and a key in all that ends before each of them, and in all."""
        begins = [0, *self._cuts]
        found = (self._within(end - begin, end - begin) for begin, end in itertools.pairwise(begins))
        return list(itertools.accumulate(found, initial=0.0))

    def _within(self, queries: float, length: float) -> float:
        """Pairs of the first ``queries`` of a part of so many positions."""
        window = self.sight.window or math.inf
        near = min(queries, window)
        back = near * near / 2 + (queries - near) * window if queries > near else near * near / 2
        if self.sight.causal:
            return back
        return queries * length if window == math.inf else queries * length - queries * queries / 2 + back

    def _until(self, position: int) -> float:
        """Pairs of the queries before a position."""
        place = bisect_right(self._cuts, position)
        if place == len(self._cuts):
            return self._before[-1]
        begin = self._cuts[place - 1] if place else 0
        return self._before[place] + self._within(position - begin, self._cuts[place] - begin)

    def pairs(self, runs: Runs) -> float:
        """How many keys the queries in ``runs`` see together."""
        return sum(self._until(first + count) - self._until(first) for first, count in runs)

    def parts(self, runs: Runs) -> int:
        """Of how many documents the positions in ``runs`` are, each once for every run. Short neighbours count as one,
        as kernels take them together."""
        found = 0
        for first, count in runs:
            inside = bisect_left(self._cuts, first + count) - bisect_right(self._cuts, first)
            found += min(inside + 1, max(1, count // FEW))
        return found

    def blocks(self, ranks: Sequence[Runs]) -> Iterator[tuple[int, int]]:
        """Pairs of a run of queries and one of keys of which anything is seen: the ranks that hold these."""
        runs = sorted((first, first + count, owner) for owner, held in enumerate(ranks) for first, count in held)
        firsts = [first for first, _, _ in runs]
        for first, end, owner in runs:
            for place in range(*self._visible(firsts, first, end)):
                yield owner, runs[place][2]

    def steps(self, ranks: Sequence[Runs]) -> int:
        """For how many steps of a ring any rank sees anything: until then keys travel."""
        most = 0
        for owner, keys in self.blocks(ranks):
            most = max(most, (owner - keys) % len(ranks))
            if most == len(ranks) - 1:
                break
        return most + 1

    def _visible(self, firsts: Sequence[int], first: int, end: int) -> tuple[int, int]:
        """The runs, by where they begin, of which the queries from ``first`` to before ``end`` see anything."""
        place = bisect_right(self._cuts, first)
        nearest = self._cuts[place - 1] if place else 0
        if self.sight.window:
            nearest = max(nearest, first - self.sight.window + 1)
        last = end if self.sight.causal else self._cuts[min(bisect_right(self._cuts, end - 1), len(self._cuts) - 1)]
        return bisect_right(firsts, nearest) - 1, bisect_right(firsts, last - 1)


@dataclass(frozen=True)
class SeenKeys:
    """What queries see in rows of ``length`` positions, of which each of ``ranks`` has some runs.

    ``documents``: expected lengths, in the order in which rows are filled with them; rows go on where the one before
    ended, and documents begin again behind the last one. Empty: a row is one document. ``together``: of how many rows
    a rank has its runs at once, so that others wait for the one that has most in all of them. ``assigned``: so many
    runs of each rank go where :func:`.ring_plan.assign_runs` says for these rows (0: none does).
    """

    sight: Sight
    length: int
    ranks: Sequence[Runs]
    documents: Sequence[int] = ()
    together: int = 1
    assigned: int = 0

    @cached_property
    def rows(self) -> list[SeenRow]:
        """Rows that stand for all: those that the documents fill once."""
        return [SeenRow(self.sight, self.length, ends) for ends in rows_of(self.documents, self.length)]

    @cached_property
    def groups(self) -> list[tuple[Sequence[SeenRow], Sequence[Runs]]]:
        """Rows that a rank has at once, and the runs of each rank meanwhile."""
        return [(rows, self._held(rows)) for rows in _grouped(self.rows, max(1, self.together))]

    def _held(self, rows: Sequence[SeenRow]) -> Sequence[Runs]:
        if not self.assigned:
            return self.ranks
        count = self.length // (len(self.ranks) * self.assigned)
        work = [sum(row.pairs([(first, count)]) for row in rows) for first in range(0, self.length, count)]
        return positions_of(assign_runs(work, len(self.ranks)), count)

    @cached_property
    def mean(self) -> float:
        """How many keys a query of the rank that sees most sees on average."""
        each = (max(sum(row.pairs(runs) / _count(runs) for row in rows) for runs in ranks) / len(rows)
                for rows, ranks in self.groups)  # fmt: skip
        return sum(each) / len(self.groups)

    @property
    def uneven(self) -> float:
        """What the rank that sees most sees, over what ranks see on average."""
        each = (sum(row.pairs([(0, self.length)]) / self.length for row in rows) / len(rows) for rows, _ in self.groups)
        return self.mean * len(self.groups) / sum(each)

    @cached_property
    def steps(self) -> float:
        """Steps of a ring in which anybody sees anything."""
        return sum(max(row.steps(ranks) for row in rows) for rows, ranks in self.groups) / len(self.groups)

    @cached_property
    def parts(self) -> float:
        """Documents in the runs of a rank: of the one that has most, in a row."""
        return sum(max(map(row.parts, ranks)) for rows, ranks in self.groups for row in rows) / len(self.rows)

    @cached_property
    def blocks(self) -> float:
        """Pairs of a run of queries and one of keys of which anything is seen: of the rank that has most, in a row."""
        return sum(_most_blocks(row, ranks) for rows, ranks in self.groups for row in rows) / len(self.rows)

    @cached_property
    def leaving(self) -> float:
        """What part of its positions the rank sends to others that sends most, before attention."""
        part = self.length // len(self.ranks)
        stays = (min(_common(runs, rank * part, part) for rank, runs in enumerate(ranks)) for _, ranks in self.groups)
        return 1 - sum(stays) / (part * len(self.groups))


@lru_cache(maxsize=256)
def seen_by(
    sight: Sight,
    length: int,
    ranks: tuple[tuple[tuple[int, int], ...], ...],
    documents: tuple[int, ...],
    together: int,
    assigned: int,
) -> SeenKeys:
    """A :class:`SeenKeys`, whose figures are found once for all layers."""
    return SeenKeys(sight, length, ranks, documents, together, assigned)


def rows_of(documents: Sequence[int], length: int) -> Iterator[tuple[int, ...]]:
    """Where documents end in each of the rows of ``length`` positions that they fill.

    >>> list(rows_of([2, 4, 2], 4)), list(rows_of([3], 4)), list(rows_of([], 4))
    ([(2, 4), (2, 4)], [(3, 4)], [(4,)])
    """
    rows = min(MOST_ROWS, -(-sum(documents) // length)) if documents else 1
    stream = itertools.cycle(documents or [length])
    left = next(stream)
    for _ in range(rows):
        ends, at = [], 0
        while at + left < length:
            at += left
            ends.append(at)
            left = next(stream)
        left -= length - at
        left = left or next(stream)
        yield (*ends, length)


def _grouped(rows: Sequence[SeenRow], count: int) -> Iterable[Sequence[SeenRow]]:
    return (rows[at : at + count] for at in range(0, len(rows), count))


def _count(runs: Runs) -> int:
    return sum(count for _, count in runs)


def _common(runs: Runs, begin: int, length: int) -> int:
    """How many of ``length`` positions from ``begin`` on are in ``runs``."""
    return sum(max(0, min(first + count, begin + length) - max(first, begin)) for first, count in runs)


def _most_blocks(row: SeenRow, ranks: Sequence[Runs]) -> int:
    return max(Counter(owner for owner, _ in row.blocks(ranks)).values())
