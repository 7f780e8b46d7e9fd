"""Which positions of packed sequences see each other, as the host knows from their ids: what no query sees is skipped,
and what is of one document needs no mask."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ...compat.torch_codegen import SHIPPED
from .blocks import Block, Seen, Sight

FEW = 64  # positions of a run at least, where shorter documents are neighbours: each run is a call of a kernel


@dataclass(frozen=True)
class IdRun:
    """Neighbouring positions, from ``first`` to before ``end``: of which documents and groups, and whether all may be
    seen. ``alike``: all of them have the same ids."""

    first: int
    end: int
    documents: frozenset[int]
    groups: frozenset[int]
    seen: bool
    alike: bool

    def cut(self, first: int, end: int) -> IdRun | None:
        """Return its part from ``first`` to before ``end``; None if there is none."""
        if first <= self.first and self.end <= end:
            return self
        first, end = max(first, self.first), min(end, self.end)
        return IdRun(first, end, self.documents, self.groups, self.seen, self.alike) if first < end else None


@dataclass(frozen=True)
class Pair:
    """Queries and keys of a block that have a document or a group in common, if any: how they see each other by their
    positions, and whether ids hide some of that (``hidden``)."""

    block: Block
    sight: Sight
    hidden: bool = False

    def tiles(self, cells: int, tiled: bool) -> Iterator[tuple[Block, Seen]]:
        """As :meth:`Sight.parts`; what ids hide is ``some``, in tiles of at most ``cells`` scores."""
        for tile, seen in self.sight.parts(self.block, cells, tiled or self.hidden):
            yield tile, "some" if self.hidden else seen


@dataclass(frozen=True)
class Row:
    """One row of a batch: ids of its positions [T], in the host's memory. ``few``: see :data:`FEW`."""

    padding: Tensor | None
    segments: Tensor | None
    groups: Tensor | None
    few: int = FEW

    @cached_property
    def queries(self) -> list[IdRun]:
        """Return all positions as runs."""
        return self._runs([self.segments, self.groups])

    @cached_property
    def keys(self) -> list[IdRun]:
        """Return the positions that may be seen, as runs."""
        return self.queries if self.padding is None else self._runs([self.segments, self.groups, self.padding])

    def pairs(self, sight: Sight, block: Block) -> Iterator[Pair]:
        """Yield what is seen of a block. A query and a key are in at most one pair."""
        for queries, keys in self._pairs(block):
            part = Block(queries.first, queries.end - queries.first, keys.first, keys.end - keys.first)
            grouped = not queries.groups.isdisjoint(keys.groups)
            yield Pair(part, Sight() if grouped else sight, not (queries.alike and keys.alike and keys.seen))

    @cached_property
    def apart(self) -> Row:
        """Return the row with each document as one run, however short.

        The row itself, if there are groups, or if a document or its keys that may be seen lie in several places.
        """
        if self.groups is not None:
            return self
        every = replace(self, few=1)
        in_one_place = (len(runs) == len({run.documents for run in runs}) for runs in (every.queries, every.keys))
        return every if all(in_one_place) else self

    def sees(self, sight: Sight, block: Block) -> bool:
        """Return whether any of the queries of a block may see any of its keys."""
        return any(
            not queries.groups.isdisjoint(keys.groups)
            or sight.seen(Block(queries.first, queries.end - queries.first, keys.first, keys.end - keys.first))
            for queries, keys in self._pairs(block)
        )

    def _pairs(self, block: Block) -> Iterator[tuple[IdRun, IdRun]]:
        """Yield runs of queries and of keys of a block that have a document or a group in common."""
        (row_end, col_end), of_document, of_group = block.ends, *self._places
        from_key, to_key = _at(self.keys, block.col), _at(self.keys, col_end - 1)
        for mine in self.queries[_at(self.queries, block.row) :]:
            if mine.first >= row_end:
                break
            queries = mine.cut(block.row, row_end)
            places = [of_document[number] for number in mine.documents] + [of_group[number] for number in mine.groups]
            for place in _within(places, from_key, to_key):
                keys = self.keys[place].cut(block.col, col_end)
                if queries is not None and keys is not None:
                    yield queries, keys

    @cached_property
    def _places(self) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """Return the indices of the runs of keys that have each document, and each group."""
        of_document, of_group = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        for place, run in enumerate(self.keys):
            for places, ids in ((of_document, run.documents), (of_group, run.groups)):
                for number in ids:
                    places[number].append(place)
        return of_document, of_group

    def _runs(self, ids: Sequence[Tensor | None]) -> list[IdRun]:
        """Return maximal runs of equal ids without those that no query sees. Short neighbours become one run."""
        length = next(len(x) for x in (self.segments, self.groups, self.padding) if x is not None)
        changes = SHIPPED.zeros(max(0, length - 1), dtype=torch.bool)
        for x in ids:
            if x is not None:
                changes |= x[1:] != x[:-1]
        firsts = [0, *(changes.nonzero().flatten() + 1).tolist()]
        columns = [[None] * len(firsts) if x is None else x[firsts].tolist() for x in (*ids, None)[:3]]
        runs: list[IdRun] = []
        for first, end, document, group, seen in zip(firsts, [*firsts[1:], length], *columns, strict=True):
            groups = frozenset([group] if group is not None and group >= 0 else [])
            run = IdRun(first, end, frozenset([document or 0]), groups, seen is not False, True)
            if runs and max(runs[-1].end - runs[-1].first, end - first) < self.few:
                runs[-1] = _merged(runs[-1], run)
            else:
                runs.append(run)
        return [run for run in runs if run.seen or not run.alike]


def _merged(first: IdRun, second: IdRun) -> IdRun:
    """Return two neighbouring runs as one."""
    documents, groups = first.documents | second.documents, first.groups | second.groups
    return IdRun(first.first, second.end, documents, groups, first.seen and second.seen, False)


def _at(runs: Sequence[IdRun], position: int) -> int:
    """Return the index of the first run that ends after a position."""
    return bisect_right(runs, position, key=lambda run: run.end)


def _within(places: Sequence[Sequence[int]], first: int, last: int) -> list[int]:
    """Return those of ``places`` from ``first`` to ``last`` in order, each once."""
    near = (x[bisect_left(x, first) : bisect_right(x, last)] for x in places)
    return sorted({place for some in near for place in some})
