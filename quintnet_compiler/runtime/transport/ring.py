"""Attention to sequences that a ring of ranks holds: keys and values travel, queries stay (Liu et al. 2023).

A rank holds one run of positions, or two (``balance``, by ``mirror_halves``): then the second is as far from the end
as the first is from the beginning, so that each rank's queries see equally many keys, at every step (Brandon et al.
2023). Every pair of a run of queries and one of keys is a block, of which only those that are seen at all are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.precision import widened
from ...ops.attention_blocks import Block
from ...ops.attention_tiles import AttentionInputs, AttentionTiles, Ids, Total
from .transport import Transport

POSITIONS = 2  # the dim of positions in q, k and v


@dataclass(frozen=True)
class Circle:
    """One rank's place in a ring: ``index`` of the ``size`` ranks of an axis."""

    transport: Transport
    axis: str
    size: int
    index: int
    at: int

    def passed(self, xs: Sequence[Tensor], back: int = -1) -> Callable[[], list[Tensor]]:
        """Begin to send ``xs`` to the next rank (or ``back`` by so many) and to receive as they come."""
        if back % self.size == 0:
            return lambda: list(xs)
        sources = tuple((i + back) % self.size for i in range(self.size))
        waits = [self.transport.permute(x, self.axis, sources, self.at) for x in xs]
        return lambda: [wait() for wait in waits]


@dataclass(frozen=True)
class Ring(Circle):
    """What a ring's attention is."""

    tiles: AttentionTiles
    balance: bool

    def runs(self, owner: int, length: int) -> list[tuple[int, int]]:
        """The runs of positions that rank ``owner`` holds while attention runs: first position and length.

        >>> Ring(None, "cp", 2, 0, 0, None, True).runs(0, 4)
        [(0, 2), (6, 2)]
        """
        if not self.balance:
            return [(owner * length, length)]
        half = length // 2
        return [(2 * owner * half, half), ((2 * self.size - 1 - 2 * owner) * half, half)]

    def blocks(self, owner: int, length: int) -> Iterator[tuple[int, int, Block]]:
        """The blocks of this rank's queries and ``owner``'s keys that are seen: places of both runs among ours."""
        for i, (row, count) in enumerate(self.runs(self.index, length)):
            for j, (col, _) in enumerate(self.runs(owner, length)):
                block = Block(row, count, col, count)
                if self.tiles.sight.seen(block) is not None:
                    yield i, j, block

    def steps(self, length: int) -> int:
        """For how many steps any rank sees anything: all of them, but few where a window is short.

        >>> from quintnet_compiler.ops.attention_blocks import Sight
        >>> Ring(None, "cp", 8, 0, 0, AttentionTiles(1.0, Sight(True, 5), 1), False).steps(4)
        2
        """
        sight = self.tiles.sight
        if not (sight.window and sight.causal):
            return self.size
        return min(self.size, 1 + (sight.window + length - 2) // length)

    def parts(self, x: Tensor, dim: int = POSITIONS) -> list[Tensor]:
        """``x`` by runs."""
        return list(x.chunk(2, dim)) if self.balance else [x]

    def mirrored(self, x: Tensor) -> Tensor:
        """What belongs to each of this rank's positions [B, T], in the order of its runs."""
        if not self.balance:
            return x
        first, second = x.chunk(2, 1)
        sources = tuple(reversed(range(self.size)))
        return torch.cat([first, self.transport.permute(second, self.axis, sources, self.at)()], 1)


def ring_forward(ring: Ring, given: AttentionInputs) -> tuple[Tensor, Tensor]:
    """The attention of this rank's queries, and each one's log of its sum of exponentials (in the runs' order)."""
    length = given.q.shape[POSITIONS]
    q, k, v = given.q, given.k, given.v
    ids = _RingIds(ring, given.padding, given.segments)
    travelling = [k, v, *ids.travelling]
    queries = ring.parts(q)
    totals = [Total(x, v.shape[3]) for x in queries]
    steps = ring.steps(length)
    for step in range(steps):
        coming = ring.passed(travelling) if step < steps - 1 else None
        keys, values = ring.parts(travelling[0]), ring.parts(travelling[1])
        for i, j, block in ring.blocks((ring.index - step) % ring.size, length):
            ring.tiles.forward(block, queries[i], keys[j], values[j], ids.of(i, j, travelling[2:]), totals[i])
        if coming is not None:
            travelling = coming()
    outs, logs = zip(*(total.finished() for total in totals), strict=True)
    return torch.cat(outs, POSITIONS), torch.cat(logs, POSITIONS)


def ring_backward(
    ring: Ring, given: AttentionInputs, grad: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v. Those of keys and values travel with them, and at last home."""
    length, wide = given.q.shape[POSITIONS], widened(given.q.dtype)
    q, k, v = given.q, given.k, given.v
    ids = _RingIds(ring, given.padding, given.segments)
    travelling = [k, v, *ids.travelling]
    asked = list(zip(*(ring.parts(x) for x in (grad, q, out, lse)), strict=True))
    for_queries = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in ring.parts(q)]
    gathered: list[Tensor] = []
    arriving: Callable[[], list[Tensor]] | None = None
    steps = ring.steps(length)
    for step in range(steps):
        coming = ring.passed(travelling) if step < steps - 1 else None
        keys, values = ring.parts(travelling[0]), ring.parts(travelling[1])
        for_keys, for_values = (
            [torch.zeros(x.shape, dtype=wide, device=x.device) for x in xs] for xs in (keys, values)
        )
        for i, j, block in ring.blocks((ring.index - step) % ring.size, length):
            into = for_queries[i], for_keys[j], for_values[j]
            grad_, q_, out_, lse_ = asked[i]
            here = ids.of(i, j, travelling[2:])
            ring.tiles.backward(block, grad_, q_, out_, lse_, keys[j], values[j], here, into)
        terms = [torch.cat(xs, POSITIONS) if len(xs) > 1 else xs[0] for xs in (for_keys, for_values)]
        gathered = terms if arriving is None else [a + b for a, b in zip(arriving(), terms, strict=True)]
        arriving = ring.passed(gathered) if step < steps - 1 else ring.passed(gathered, back=step)
        if coming is not None:
            travelling = coming()
    assert arriving is not None
    dk, dv = (x.to(k.dtype) for x in arriving())
    return torch.cat(for_queries, POSITIONS).to(q.dtype), dk, dv


class _RingIds:
    """Which keys may be seen at all, and the documents of queries and keys, by runs."""

    def __init__(self, ring: Ring, padding: Tensor | None, segments: Tensor | None) -> None:
        self.ring = ring
        given = (None if padding is None else padding.to(torch.uint8), segments)
        moved = [None if x is None else ring.mirrored(x) for x in given]
        self.has = [x is not None for x in moved]
        self.travelling = [x for x in moved if x is not None]
        self.documents = None if moved[1] is None else ring.parts(moved[1], 1)

    def of(self, i: int, j: int, travelling: Sequence[Tensor]) -> Ids:
        """Those of the queries of run ``i`` and of run ``j`` of the keys that are here."""
        here = iter(travelling)
        padding, segments = (self.ring.parts(next(here), 1)[j] if has else None for has in self.has)
        documents = None if segments is None or self.documents is None else (self.documents[i], segments)
        return Ids(None if padding is None else padding.bool(), documents)
