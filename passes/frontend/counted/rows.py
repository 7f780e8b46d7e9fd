"""Indices that count rows: ``x[torch.arange(B), y]`` reads one element of each row.

An index whose elements are their own places leads from every row to itself. As a gather along the other indexed dims,
each row can be computed by itself::

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
    """The factors of the broadcast shape of all indices.

    ``sizes``: of the factors, outermost first. ``counted``: for each indexed dim, the factors that its index counts;
    None if it does not count.
    """

    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    counted: tuple[tuple[int, ...] | None, ...]

    @property
    def row_factors(self) -> list[int]:
        """Return the factors that the index of some dim counts, in order."""
        return sorted(factor for dim in self.counted if dim for factor in dim)

    @property
    def others(self) -> list[int]:
        return [factor for factor in range(len(self.sizes)) if factor not in self.row_factors]


@dataclass(frozen=True)
class CountedRows:
    """``x`` and its indices, one for each dim (None: the whole dim), some of which count."""

    builder: GraphBuilder
    x: fx.Node
    indices: Sequence[fx.Node | None]
    places: _Places

    @classmethod
    def from_indices(cls, builder: GraphBuilder, x: fx.Node, indices: Sequence[fx.Node | None]) -> CountedRows | None:
        """Return the lookup, or None if no index counts a whole dim of ``x`` or one is a mask."""
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
        """Return the dims without an index."""
        return [dim for dim in range(len(shape(self.x))) if dim not in self.indexed]

    @property
    def position(self) -> int:
        """Return the position of the indices' dims in the result: 0 if indexed dims are not adjacent."""
        first, last = self.indexed[0], self.indexed[-1]
        return first if last - first + 1 == len(self.indexed) else 0

    def read(self) -> fx.Node:
        """Emit ``x[indices]``."""
        held = self._rows_first()
        places, looked_up = self.places, self._looked_up()
        if not looked_up:
            held = self._spread(held)
        for step, index in enumerate(looked_up):
            held = self._gathered(held, index, first=step == 0)
        size = shape(held)[len(places.sizes) :]
        return self._put_back(self.builder.reshape(held, [*places.shape, *size]))

    def written(self, put: fx.Node, *, adds: bool) -> fx.Node | None:
        """Emit ``x`` with ``put`` at ``x[indices]``; return None if one place might be written twice."""
        looked_up, places = self._looked_up(), self.places
        if places.others and (len(looked_up) > 1 or not (looked_up or adds)):
            return None
        return self._back_in_place(self._placed(self._rows_first(), self._put_first(put), looked_up, adds=adds))

    def _looked_up(self) -> list[fx.Node]:
        """Return the indices that do not count, as non-negative int64 numbers for all places."""
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

    def _split_dims(self) -> tuple[list[int], list[int]]:
        """Return the sizes of ``x`` with counted dims split into factors, and an order of dims.

        The order has these factors first, then dims that are looked up, then the others.
        """
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
        sizes, order = self._split_dims()
        return self._permuted(self.builder.reshape(self.x, sizes), order)

    def _back_in_place(self, held: fx.Node) -> fx.Node:
        _, order = self._split_dims()
        return self.builder.reshape(self._permuted(held, _inverse(order)), shape(self.x))

    def _spread(self, held: fx.Node) -> fx.Node:
        """Emit the same rows for all places, if every index counts."""
        rest, places = list(shape(held)[len(self.places.row_factors) :]), self.places
        thin = [size if factor in places.row_factors else 1 for factor, size in enumerate(places.sizes)]
        return self._expanded(self.builder.reshape(held, [*thin, *rest]), [*places.sizes, *rest])

    def _gathered(self, held: fx.Node, index: fx.Node, *, first: bool) -> fx.Node:
        """Look up the dim after the rows.

        The first time in each row, once for every other place; after that in each place.
        """
        places = self.places
        rows = places.row_factors if first else list(range(len(places.sizes)))
        others = places.others if first else []
        behind = list(shape(held)[len(rows) + 1 :])
        index = self._index(index, rows, others, behind)
        picked = self.builder.call(aten.gather.default, held, len(rows), index)
        sizes = [places.sizes[factor] for factor in (*rows, *others)]
        picked = self.builder.reshape(picked, [*sizes, *behind])
        count = len(sizes)
        return self._permuted(picked, [*_inverse([*rows, *others]), *range(count, count + len(behind))])

    def _index(self, index: fx.Node, rows: Sequence[int], others: Sequence[int], behind: Sequence[int]) -> fx.Node:
        """Return an index [*rows, other places, *behind] from one of all places."""
        index = self._permuted(index, [*rows, *others])
        sizes = [self.places.sizes[factor] for factor in rows]
        many = prod(self.places.sizes[factor] for factor in others)
        index = self.builder.reshape(index, [*sizes, many, *[1] * len(behind)])
        return self._expanded(index, [*sizes, many, *behind])

    def _put_back(self, result: fx.Node) -> fx.Node:
        """Move the dims of the indices from the front to their position in the result."""
        count, at = len(self.places.shape), self.position
        rest = list(range(count, len(shape(result))))
        return self._permuted(result, [*rest[:at], *range(count), *rest[at:]])

    def _put_first(self, put: fx.Node) -> fx.Node:
        """Return the written value for all places: rows first, then other places, then the other dims of ``x``."""
        places, at, count = self.places, self.position, len(self.places.shape)
        rest = [shape(self.x)[dim] for dim in self.rest]
        put = self._expanded(put, [*rest[:at], *places.shape, *rest[at:]])
        put = self._permuted(put, [*range(at, at + count), *range(at), *range(at + count, count + len(rest))])
        put = self.builder.reshape(put, [*places.sizes, *rest])
        behind = range(len(places.sizes), len(places.sizes) + len(rest))
        return self._permuted(put, [*places.row_factors, *places.others, *behind])

    def _placed(self, held: fx.Node, put: fx.Node, indices: Sequence[fx.Node], *, adds: bool) -> fx.Node:
        """Emit ``held`` [*rows, *dims of ``indices``, *others] with ``put`` written into it."""
        call, rows = self.builder.call, len(self.places.row_factors)
        if not indices:
            others = list(range(rows, rows + len(self.places.others)))
            put = call(aten.sum.dim_IntList, put, others, False) if others else put
            return call(aten.add.Tensor, held, put) if adds else put
        behind = list(shape(held)[rows + 1 :])
        index = self._index(indices[0], self.places.row_factors, self.places.others, behind)
        if len(indices) > 1:  # read what is there, write into that, and put it back
            current = call(aten.gather.default, held, rows, index)
            current = self.builder.reshape(current, [*shape(held)[:rows], *behind])
            put, adds = self._placed(current, put, indices[1:], adds=adds), False
        put = self.builder.reshape(put, shape(index))
        operator = aten.scatter_add.default if adds else aten.scatter.src
        return call(operator, held, rows, index, put)


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _places(indices: Sequence[fx.Node], sizes: Sequence[int]) -> _Places | None:
    """Return how the places of ``indices`` fall into factors, if one of them counts its whole dim, of ``sizes``."""
    broadcast = tuple(torch.broadcast_shapes(*map(shape, indices)))  # type: ignore[no-untyped-call]
    counters: list[Counter | None] = []
    bounds = [{1, size} for size in broadcast]
    counted: set[tuple[int, int]] = set()
    for index, size in zip(indices, sizes, strict=True):
        counts = counter(index, len(broadcast))
        if counts is None or prod(part.size for part in counts) != size:
            counters.append(None)
            continue
        ends = [bounds[part.axis] | {part.inside, part.inside * part.size} for part in counts]
        factors = {(part.axis, part.inside) for part in counts}
        if factors & counted or not all(map(_nested, ends)):  # a diagonal, or factors that no shape has
            counters.append(None)
            continue
        for part, end in zip(counts, ends, strict=True):
            bounds[part.axis] |= end
        counted |= factors
        counters.append(counts)
    if not any(counters):
        return None
    return _factors(broadcast, [sorted(ends, reverse=True) for ends in bounds], counters)


def _nested(bounds: set[int]) -> bool:
    ordered = sorted(bounds)
    return all(large % small == 0 for small, large in pairwise(ordered))


def _factors(
    broadcast: tuple[int, ...], bounds: Sequence[Sequence[int]], counters: Sequence[Counter | None]
) -> _Places | None:
    """Return the factors. ``bounds``: for each axis, the products of its innermost factors, from all to none."""
    numbers: dict[tuple[int, int], int] = {}  # (axis, product of the factors inside) -> factor
    sizes: list[int] = []
    for axis, ends in enumerate(bounds):
        for large, small in pairwise(ends):
            numbers[axis, small] = len(sizes)
            sizes.append(large // small)
    counted: list[tuple[int, ...] | None] = []
    for counts in counters:
        if counts is None:
            counted.append(None)
            continue
        factors: list[int] = []
        for part in counts:
            inside = [small for small in bounds[part.axis] if part.inside <= small < part.inside * part.size]
            factors += [numbers[part.axis, small] for small in inside]
        counted.append(tuple(factors))
    used = [factor for factors in counted if factors for factor in factors]
    return _Places(broadcast, tuple(sizes), tuple(counted)) if len(used) == len(set(used)) else None
