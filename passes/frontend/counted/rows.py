"""Indices that count: ``x[torch.arange(B), y]`` reads of each row what that row says.

An index that is the number of its own place leads from every row to itself. Spelled as a gather along the other indexed
dims, rows stay apart, and any of them may be computed on its own::

    z[torch.arange(B), y]                          # z: [B, C], y: [B]
    gather(z, 1, y[:, None])[:, 0]
    h[torch.arange(B)[:, None], picks]             # h: [B, T, D], picks: [B, K]
    gather(h, 1, picks[:, :, None].expand(B, K, D))
    x[torch.arange(B), y] = v
    scatter(x, 1, y[:, None], v[:, None])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import fx

from ....core.annotations import shape, value
from ....ir.builder import GraphBuilder
from .counters import Counter, counter

aten = torch.ops.aten


@dataclass(frozen=True)
class _Places:
    """How the broadcast shape of all indices falls into the factors that counters have.

    ``sizes``: of the factors, outermost first. ``counted``: for each indexed dim the factors whose number it is; None
    where the index says something else.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    counted: tuple[tuple[int, ...] | None, ...]

    @property
    def rows(self) -> list[int]:
        """The factors that some dim counts, in order."""
        return sorted(factor for dim in self.counted if dim for factor in dim)

    @property
    def others(self) -> list[int]:
        return [factor for factor in range(len(self.sizes)) if factor not in self.rows]


@dataclass(frozen=True)
class CountedRows:
    """``x`` and its indices, one for each dim (None: the whole dim), some of which count."""

    builder: GraphBuilder
    x: fx.Node
    indices: Sequence[fx.Node | None]
    places: _Places

    @classmethod
    def of(cls, builder: GraphBuilder, x: fx.Node, indices: Sequence[fx.Node | None]) -> CountedRows | None:
        """None where no index counts a whole dim of ``x``, or a mask is among them."""
        used = [index for index in indices if index is not None]
        if any(value(index).dtype in (torch.bool, torch.uint8) for index in used):
            return None
        sizes = [size for size, index in zip(shape(x), indices, strict=False) if index is not None]
        places = _places(used, sizes)
        return None if places is None else cls(builder, x, indices, places)

    @property
    def indexed(self) -> list[int]:
        return [dim for dim, index in enumerate(self.indices) if index is not None]

    @property
    def rest(self) -> list[int]:
        """The dims that no index is for."""
        return [dim for dim in range(len(shape(self.x))) if dim not in self.indexed]

    @property
    def position(self) -> int:
        """Where the result has the dims of the indices: first, if these do not stand together."""
        first, last = self.indexed[0], self.indexed[-1]
        return first if last - first + 1 == len(self.indexed) else 0

    def read(self) -> fx.Node:
        """``x[indices]``."""
        held = self._rows_first()
        places, looked_up = self.places, self._looked_up()
        if not looked_up:
            held = self._spread(held)
        for step, index in enumerate(looked_up):
            held = self._gathered(held, index, first=step == 0)
        size = shape(held)[len(places.sizes) :]
        return self._put_back(self.builder.reshape(held, [*places.shape, *size]))

    def written(self, put: fx.Node, *, adds: bool) -> fx.Node | None:
        """``x`` with ``put`` in the places of ``x[indices]``; None where one place might be written twice."""
        looked_up, places = self._looked_up(), self.places
        if places.others and (len(looked_up) > 1 or not (looked_up or adds)):
            return None
        return self._back_in_place(self._placed(self._rows_first(), self._put_first(put), looked_up, adds=adds))

    def _looked_up(self) -> list[fx.Node]:
        """The indices that do not count, as int64 numbers from 0 of all places."""
        pairs = zip(self.indexed, self.places.counted, strict=True)
        dims = [dim for dim, factors in pairs if factors is None]
        indices = [(self.indices[dim], shape(self.x)[dim]) for dim in dims]
        return [self._from_zero(index, size) for index, size in indices if index is not None]

    def _from_zero(self, index: fx.Node, size: int) -> fx.Node:
        call = self.builder.call
        if value(index).dtype is not torch.int64:
            index = call(aten._to_copy.default, index, dtype=torch.int64)
        below = call(aten.lt.Scalar, index, 0)
        index = call(aten.where.self, below, call(aten.add.Scalar, index, size), index)
        return self.builder.reshape(self._expanded(index, self.places.shape), self.places.sizes)

    def _expanded(self, x: fx.Node, sizes: Sequence[int]) -> fx.Node:
        return x if shape(x) == tuple(sizes) else self.builder.call(aten.expand.default, x, list(sizes))

    def _permuted(self, x: fx.Node, order: Sequence[int]) -> fx.Node:
        same = list(order) == list(range(len(order)))
        return x if same else self.builder.call(aten.permute.default, x, list(order))

    def _apart(self) -> tuple[list[int], list[int]]:
        """The sizes of ``x`` with counted dims as their factors, and the order that puts these first, then dims that
        are looked up, then the rest."""
        sizes: list[int] = []
        rows: dict[int, int] = {}  # factor -> dim
        looked_up: list[int] = []
        rest: list[int] = []
        counted = dict(zip(self.indexed, self.places.counted, strict=True))
        for dim, size in enumerate(shape(self.x)):
            factors = counted.get(dim)
            if factors is not None:
                rows |= {factor: len(sizes) + at for at, factor in enumerate(factors)}
                sizes += [self.places.sizes[factor] for factor in factors]
                continue
            (looked_up if dim in counted else rest).append(len(sizes))
            sizes.append(size)
        return sizes, [*(rows[factor] for factor in sorted(rows)), *looked_up, *rest]

    def _rows_first(self) -> fx.Node:
        sizes, order = self._apart()
        return self._permuted(self.builder.reshape(self.x, sizes), order)

    def _back_in_place(self, held: fx.Node) -> fx.Node:
        _, order = self._apart()
        return self.builder.reshape(self._permuted(held, _inverse(order)), shape(self.x))

    def _spread(self, held: fx.Node) -> fx.Node:
        """The same rows for all places, where every index counts."""
        rest, places = list(shape(held)[len(self.places.rows) :]), self.places
        thin = [size if factor in places.rows else 1 for factor, size in enumerate(places.sizes)]
        return self._expanded(self.builder.reshape(held, [*thin, *rest]), [*places.sizes, *rest])

    def _gathered(self, held: fx.Node, index: fx.Node, *, first: bool) -> fx.Node:
        """Look up the dim behind the rows: the first time, of each row, as many as there are other places; then of all
        places."""
        places = self.places
        rows = places.rows if first else list(range(len(places.sizes)))
        others = places.others if first else []
        behind = list(shape(held)[len(rows) + 1 :])
        index = self._index(index, rows, others, behind)
        picked = self.builder.call(aten.gather.default, held, len(rows), index)
        sizes = [places.sizes[factor] for factor in (*rows, *others)]
        picked = self.builder.reshape(picked, [*sizes, *behind])
        count = len(sizes)
        return self._permuted(picked, [*_inverse([*rows, *others]), *range(count, count + len(behind))])

    def _index(self, index: fx.Node, rows: Sequence[int], others: Sequence[int], behind: Sequence[int]) -> fx.Node:
        """An index of all places as one of the rows, of the other places as one dim, and of what is behind."""
        index = self._permuted(index, [*rows, *others])
        sizes = [self.places.sizes[factor] for factor in rows]
        many = prod(self.places.sizes[factor] for factor in others)
        index = self.builder.reshape(index, [*sizes, many, *[1] * len(behind)])
        return self._expanded(index, [*sizes, many, *behind])

    def _put_back(self, result: fx.Node) -> fx.Node:
        """The dims of the indices from the front to where the result has them."""
        count, at = len(self.places.shape), self.position
        rest = list(range(count, len(shape(result))))
        return self._permuted(result, [*rest[:at], *range(count), *rest[at:]])

    def _put_first(self, put: fx.Node) -> fx.Node:
        """Return what is written, of all places and the rest of ``x``: rows first, then other places, then the rest."""
        places, at, count = self.places, self.position, len(self.places.shape)
        rest = [shape(self.x)[dim] for dim in self.rest]
        put = self._expanded(put, [*rest[:at], *places.shape, *rest[at:]])
        put = self._permuted(put, [*range(at, at + count), *range(at), *range(at + count, count + len(rest))])
        put = self.builder.reshape(put, [*places.sizes, *rest])
        behind = range(len(places.sizes), len(places.sizes) + len(rest))
        return self._permuted(put, [*places.rows, *places.others, *behind])

    def _placed(self, held: fx.Node, put: fx.Node, indices: Sequence[fx.Node], *, adds: bool) -> fx.Node:
        """``held`` (rows, a dim for each of ``indices``, the rest) with ``put`` written into it."""
        call, rows = self.builder.call, len(self.places.rows)
        if not indices:
            others = list(range(rows, rows + len(self.places.others)))
            put = call(aten.sum.dim_IntList, put, others, False) if others else put
            return call(aten.add.Tensor, held, put) if adds else put
        behind = list(shape(held)[rows + 1 :])
        index = self._index(indices[0], self.places.rows, self.places.others, behind)
        if len(indices) > 1:  # what is there now, with what is written into that, takes its place
            there = call(aten.gather.default, held, rows, index)
            there = self.builder.reshape(there, [*shape(held)[:rows], *behind])
            put, adds = self._placed(there, put, indices[1:], adds=adds), False
        put = self.builder.reshape(put, shape(index))
        operator = aten.scatter_add.default if adds else aten.scatter.src
        return call(operator, held, rows, index, put)


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _places(indices: Sequence[fx.Node], sizes: Sequence[int]) -> _Places | None:
    """Return how the places of ``indices`` fall into factors, if one of them counts its whole dim, of ``sizes``."""
    everywhere = tuple(torch.broadcast_shapes(*map(shape, indices)))  # type: ignore[no-untyped-call]
    counters: list[Counter | None] = []
    bounds = [{1, size} for size in everywhere]
    taken: set[tuple[int, int]] = set()
    for index, size in zip(indices, sizes, strict=True):
        counts = counter(index, len(everywhere))
        if counts is None or prod(part.size for part in counts) != size:
            counters.append(None)
            continue
        ends = [bounds[part.axis] | {part.inside, part.inside * part.size} for part in counts]
        mine = {(part.axis, part.inside) for part in counts}
        if mine & taken or not all(map(_nested, ends)):  # a diagonal, or factors that no shape has
            counters.append(None)
            continue
        for part, end in zip(counts, ends, strict=True):
            bounds[part.axis] |= end
        taken |= mine
        counters.append(counts)
    if not any(counters):
        return None
    return _factors(everywhere, [sorted(one, reverse=True) for one in bounds], counters)


def _nested(bounds: set[int]) -> bool:
    ordered = sorted(bounds)
    return all(large % small == 0 for small, large in pairwise(ordered))


def _factors(
    everywhere: tuple[int, ...], bounds: Sequence[Sequence[int]], counters: Sequence[Counter | None]
) -> _Places | None:
    """``bounds``: of each axis the products of its innermost factors, from all of them to none."""
    named: dict[tuple[int, int], int] = {}  # (axis, product of the factors inside) -> factor
    sizes: list[int] = []
    for axis, ends in enumerate(bounds):
        for large, small in pairwise(ends):
            named[axis, small] = len(sizes)
            sizes.append(large // small)
    counted: list[tuple[int, ...] | None] = []
    for counts in counters:
        if counts is None:
            counted.append(None)
            continue
        factors: list[int] = []
        for part in counts:
            inside = [small for small in bounds[part.axis] if part.inside <= small < part.inside * part.size]
            factors += [named[part.axis, small] for small in inside]
        counted.append(tuple(factors))
    used = [factor for factors in counted if factors for factor in factors]
    return _Places(everywhere, tuple(sizes), tuple(counted)) if len(used) == len(set(used)) else None
