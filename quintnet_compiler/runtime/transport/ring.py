"""Attention to sequences that a ring of ranks holds: keys and values travel, queries stay (Liu et al. 2023).

A rank holds one run of positions, or those that a plan assigns to it: equally much work for all ranks (for one
document as Brandon et al. 2023 have it, see :mod:`...ops.attention.ring_plan`). Every pair of a run of queries and one
of keys is a block, of which only those that are seen at all are computed; ids of all positions, which say so, are on
every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.precision import widened
from ...ops.attention.blocks import Block
from ...ops.attention.ring_plan import Held, Runs, positions_of
from ...ops.attention.tiles import AttentionInputs, AttentionTiles, Ids, Total
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
    """What a ring's attention is. ``runs``: the runs of positions that each rank holds while attention runs."""

    tiles: AttentionTiles
    runs: Sequence[Runs]

    def blocks(self, owner: int, ids: Ids, of: int | None = None) -> Iterator[tuple[int, int, Block]]:
        """The blocks of this rank's queries (or of those of rank ``of``) and ``owner``'s keys that are seen: places of
        both runs among theirs."""
        for i, (row, rows) in enumerate(self.runs[self.index if of is None else of]):
            for j, (col, cols) in enumerate(self.runs[owner]):
                block = Block(row, rows, col, cols)
                if ids.sees(self.tiles.sight, block):
                    yield i, j, block

    def steps(self, ids: Ids) -> int:
        """For how many steps any rank sees anything: all of them, but few where a window or documents are short. All
        ranks find the same.

        >>> from quintnet_compiler.ops.attention.blocks import Sight
        >>> Ring(None, "cp", 8, 0, 0, AttentionTiles(1.0, Sight(True, 5), 1), runs_of(None, 8, 4)).steps(Ids())
        2
        """
        for step in reversed(range(1, self.size)):
            if any(True for i in range(self.size) for _ in self.blocks((i - step) % self.size, ids, i)):
                return step + 1
        return 1

    def parts(self, x: Tensor, owner: int | None = None) -> Sequence[Tensor]:
        """``x``, of this rank or of ``owner``, by runs."""
        sizes = [count for _, count in self.runs[self.index if owner is None else owner]]
        return torch.split(x, sizes, POSITIONS)


def runs_of(plan: Tensor | None, size: int, length: int) -> list[Runs]:
    """The runs of the ranks of a ring that hold ``length`` positions each; without a plan (or its values) in order."""
    held: Held = [[rank] for rank in range(size)] if plan is None or plan.is_meta else plan.tolist()
    return positions_of(held, length // len(held[0]))


def ring_forward(ring: Ring, given: AttentionInputs) -> tuple[Tensor, Tensor]:
    """The attention of this rank's queries, and each one's log of its sum of exponentials (in the runs' order)."""
    q, k, v = given.q, given.k, given.v
    ids = given.ids
    travelling = [k, v]
    queries = ring.parts(q)
    totals = [Total(x, v.shape[3]) for x in queries]
    steps = ring.steps(ids)
    for step in range(steps):
        coming = ring.passed(travelling) if step < steps - 1 else None
        owner = (ring.index - step) % ring.size
        keys, values = (ring.parts(x, owner) for x in travelling)
        for i, j, block in ring.blocks(owner, ids):
            ring.tiles.forward(block, queries[i], keys[j], values[j], ids, totals[i])
        if coming is not None:
            travelling = coming()
    outs, logs = zip(*(total.finished() for total in totals), strict=True)
    return torch.cat(outs, POSITIONS), torch.cat(logs, POSITIONS)


def ring_backward(
    ring: Ring, given: AttentionInputs, grad: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v. Those of keys and values travel with them, and at last home."""
    wide = widened(given.q.dtype)
    q, k, v = given.q, given.k, given.v
    ids = given.ids
    travelling = [k, v]
    asked = list(zip(*(ring.parts(x) for x in (grad, q, out, lse)), strict=True))
    for_queries = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in ring.parts(q)]
    gathered: list[Tensor] = []
    arriving: Callable[[], list[Tensor]] | None = None
    steps = ring.steps(ids)
    for step in range(steps):
        coming = ring.passed(travelling) if step < steps - 1 else None
        owner = (ring.index - step) % ring.size
        keys, values = (ring.parts(x, owner) for x in travelling)
        for_keys, for_values = (
            [torch.zeros(x.shape, dtype=wide, device=x.device) for x in xs] for xs in (keys, values)
        )
        for i, j, block in ring.blocks(owner, ids):
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
