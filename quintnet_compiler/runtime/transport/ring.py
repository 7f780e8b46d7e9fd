"""Attention to sequences that a ring of ranks holds: keys and values travel, queries stay (Liu et al. 2023).

A rank holds one run of positions, or two (``balance``, by ``mirror_halves``): then the second is as far from the end
as the first is from the beginning, so that each rank's queries see equally many keys, at every step (Brandon et al.
2023). Every pair of a run of queries and one of keys is a block, of which only those that are seen at all are computed;
ids of all positions, which say so, are on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.precision import widened
from ...ops.attention_blocks import Block, ring_runs
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
        """The runs of positions that rank ``owner`` holds while attention runs: first position and length."""
        return ring_runs(owner, self.size, length, self.balance)

    def blocks(self, owner: int, length: int, ids: Ids, of: int | None = None) -> Iterator[tuple[int, int, Block]]:
        """The blocks of this rank's queries (or of those of rank ``of``) and ``owner``'s keys that are seen: places of
        both runs among theirs."""
        for i, (row, count) in enumerate(self.runs(self.index if of is None else of, length)):
            for j, (col, _) in enumerate(self.runs(owner, length)):
                block = Block(row, count, col, count)
                if ids.sees(self.tiles.sight, block):
                    yield i, j, block

    def steps(self, length: int, ids: Ids) -> int:
        """For how many steps any rank sees anything: all of them, but few where a window or documents are short. All
        ranks find the same.

        >>> from quintnet_compiler.ops.attention_blocks import Sight
        >>> Ring(None, "cp", 8, 0, 0, AttentionTiles(1.0, Sight(True, 5), 1), False).steps(4, Ids())
        2
        """
        for step in reversed(range(1, self.size)):
            if any(True for i in range(self.size) for _ in self.blocks((i - step) % self.size, length, ids, i)):
                return step + 1
        return 1

    def parts(self, x: Tensor, dim: int = POSITIONS) -> list[Tensor]:
        """``x`` by runs."""
        return list(x.chunk(2, dim)) if self.balance else [x]


def ring_forward(ring: Ring, given: AttentionInputs) -> tuple[Tensor, Tensor]:
    """The attention of this rank's queries, and each one's log of its sum of exponentials (in the runs' order)."""
    length = given.q.shape[POSITIONS]
    q, k, v = given.q, given.k, given.v
    ids = given.ids
    travelling = [k, v]
    queries = ring.parts(q)
    totals = [Total(x, v.shape[3]) for x in queries]
    steps = ring.steps(length, ids)
    for step in range(steps):
        coming = ring.passed(travelling) if step < steps - 1 else None
        keys, values = ring.parts(travelling[0]), ring.parts(travelling[1])
        for i, j, block in ring.blocks((ring.index - step) % ring.size, length, ids):
            ring.tiles.forward(block, queries[i], keys[j], values[j], ids, totals[i])
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
    ids = given.ids
    travelling = [k, v]
    asked = list(zip(*(ring.parts(x) for x in (grad, q, out, lse)), strict=True))
    for_queries = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in ring.parts(q)]
    gathered: list[Tensor] = []
    arriving: Callable[[], list[Tensor]] | None = None
    steps = ring.steps(length, ids)
    for step in range(steps):
        coming = ring.passed(travelling) if step < steps - 1 else None
        keys, values = ring.parts(travelling[0]), ring.parts(travelling[1])
        for_keys, for_values = (
            [torch.zeros(x.shape, dtype=wide, device=x.device) for x in xs] for xs in (keys, values)
        )
        for i, j, block in ring.blocks((ring.index - step) % ring.size, length, ids):
            into = for_queries[i], for_keys[j], for_values[j]
            grad_, q_, out_, lse_ = asked[i]
            ring.tiles.backward(block, grad_, q_, out_, lse_, keys[j], values[j], ids, into)
        terms = [torch.cat(xs, POSITIONS) if len(xs) > 1 else xs[0] for xs in (for_keys, for_values)]
        gathered = terms if arriving is None else [a + b for a, b in zip(arriving(), terms, strict=True)]
        arriving = ring.passed(gathered) if step < steps - 1 else ring.passed(gathered, back=step)
        if coming is not None:
            travelling = coming()
    assert arriving is not None
    dk, dv = (x.to(k.dtype) for x in arriving())
    return torch.cat(for_queries, POSITIONS).to(q.dtype), dk, dv
