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
        """Return the ends of the parts that see each other: documents, cut into chunks."""
        chunk = self.sight.chunk
        return sorted({*self.ends, *(range(chunk, self.length, chunk) if chunk else ())})

    @cached_property
    def _before(self) -> list[float]:
        """Return the pairs of a query and a key before each part, and at last in all parts."""
        begins = [0, *self._cuts]
        pairs = (self._within(end - begin, end - begin) for begin, end in itertools.pairwise(begins))
        return list(itertools.accumulate(pairs, initial=0.0))

    def _within(self, queries: float, length: float) -> float:
        """Return the pairs of the first ``queries`` of a part of ``length`` positions."""
        window = self.sight.window or math.inf
        near = min(queries, window)
        back = near * near / 2 + (queries - near) * window if queries > near else near * near / 2
        if self.sight.causal:
            return back
        return queries * length if window == math.inf else queries * length - queries * queries / 2 + back

    def _until(self, position: int) -> float:
        """Return the pairs of the queries before a position."""
        place = bisect_right(self._cuts, position)
        if place == len(self._cuts):
            return self._before[-1]
        begin = self._cuts[place - 1] if place else 0
        return self._before[place] + self._within(position - begin, self._cuts[place] - begin)

    def pairs(self, runs: Runs) -> float:
        """Return the number of keys that the queries in ``runs`` see together."""
        return sum(self._until(first + count) - self._until(first) for first, count in runs)

    def parts(self, runs: Runs) -> int:
        """Count the documents in each of ``runs``; short neighbours count as one, as kernels take them together."""
        documents = 0
        for first, count in runs:
            inside = bisect_left(self._cuts, first + count) - bisect_right(self._cuts, first)
            documents += min(inside + 1, max(1, count // FEW))
        return documents

    def blocks(self, ranks: Sequence[Runs]) -> Iterator[tuple[int, int]]:
        """Yield the ranks of a run of queries and a run of keys, for each such pair of which anything is seen."""
        runs = sorted((first, first + count, owner) for owner, held in enumerate(ranks) for first, count in held)
        firsts = [first for first, _, _ in runs]
        for first, end, owner in runs:
            for place in range(*self._visible(firsts, first, end)):
                yield owner, runs[place][2]

    def steps(self, ranks: Sequence[Runs]) -> int:
        """Return the number of steps of a ring after which no rank sees anything: until then keys travel."""
        most = 0
        for owner, keys in self.blocks(ranks):
            most = max(most, (owner - keys) % len(ranks))
            if most == len(ranks) - 1:
                break
        return most + 1

    def _visible(self, firsts: Sequence[int], first: int, end: int) -> tuple[int, int]:
        """Return the range of runs, by their ``firsts``, that queries from ``first`` to before ``end`` see in part."""
        place = bisect_right(self._cuts, first)
        nearest = self._cuts[place - 1] if place else 0
        if self.sight.window:
            nearest = max(nearest, first - self.sight.window + 1)
        last = end if self.sight.causal else self._cuts[min(bisect_right(self._cuts, end - 1), len(self._cuts) - 1)]
        return bisect_right(firsts, nearest) - 1, bisect_right(firsts, last - 1)


@dataclass(frozen=True)
class SeenKeys:
    """Numbers of keys that queries see in rows whose positions ranks share.

    Attributes:
        sight: which keys a query sees by its position.
        length: positions of a row.
        ranks: the runs of positions of each rank.
        documents: expected lengths, which are laid out one after the other across rows; the list repeats. Empty: a row
            is one document.
        together: rows that a rank computes at once, so that others wait for the one that has most in all of them.
        assigned: runs of each rank that go where :func:`.ring_plan.assign_runs` says for these rows; 0: none does.
    """

    sight: Sight
    length: int
    ranks: Sequence[Runs]
    documents: Sequence[int] = ()
    together: int = 1
    assigned: int = 0

    @cached_property
    def rows(self) -> list[SeenRow]:
        """Return rows that stand for all: those that the documents fill once."""
        return [SeenRow(self.sight, self.length, ends) for ends in rows_of(self.documents, self.length)]

    @cached_property
    def groups(self) -> list[tuple[Sequence[SeenRow], Sequence[Runs]]]:
        """Return the rows that a rank has at once, and the runs of each rank meanwhile."""
        return [(rows, self._held(rows)) for rows in _grouped(self.rows, max(1, self.together))]

    def _held(self, rows: Sequence[SeenRow]) -> Sequence[Runs]:
        if not self.assigned:
            return self.ranks
        count = self.length // (len(self.ranks) * self.assigned)
        work = [sum(row.pairs([(first, count)]) for row in rows) for first in range(0, self.length, count)]
        return positions_of(assign_runs(work, len(self.ranks)), count)

    @cached_property
    def mean(self) -> float:
        """Return the mean number of keys that a query sees, of the rank that sees most."""
        each = (max(sum(row.pairs(runs) / _count(runs) for row in rows) for runs in ranks) / len(rows)
                for rows, ranks in self.groups)  # fmt: skip
        return sum(each) / len(self.groups)

    @property
    def uneven(self) -> float:
        """Return the keys that the rank that sees most sees, over the mean of all ranks."""
        each = (sum(row.pairs([(0, self.length)]) / self.length for row in rows) / len(rows) for rows, _ in self.groups)
        return self.mean * len(self.groups) / sum(each)

    @cached_property
    def steps(self) -> float:
        """Return the steps of a ring in which any rank sees anything, mean over groups."""
        return sum(max(row.steps(ranks) for row in rows) for rows, ranks in self.groups) / len(self.groups)

    @cached_property
    def parts(self) -> float:
        """Return the documents in the runs of the rank that has most, mean over rows."""
        return sum(max(map(row.parts, ranks)) for rows, ranks in self.groups for row in rows) / len(self.rows)

    @cached_property
    def blocks(self) -> float:
        """Return the pairs of runs of queries and keys that see each other: the most of any rank, mean over rows."""
        return sum(_most_blocks(row, ranks) for rows, ranks in self.groups for row in rows) / len(self.rows)

    @cached_property
    def leaving(self) -> float:
        """Return the largest fraction of its positions that a rank sends to others before attention."""
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
    """Return a :class:`SeenKeys`, whose figures are computed once for all layers."""
    return SeenKeys(sight, length, ranks, documents, together, assigned)


def rows_of(documents: Sequence[int], length: int) -> Iterator[tuple[int, ...]]:
    """Yield the ends of documents in each of the rows of ``length`` positions that they fill.

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
    """Return how many of ``length`` positions from ``begin`` on are in ``runs``."""
    return sum(max(0, min(first + count, begin + length) - max(first, begin)) for first, count in runs)


def _most_blocks(row: SeenRow, ranks: Sequence[Runs]) -> int:
    return max(Counter(owner for owner, _ in row.blocks(ranks)).values())
