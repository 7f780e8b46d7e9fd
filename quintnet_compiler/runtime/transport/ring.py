"""Ring attention: keys and values are passed around a ring of ranks, queries stay (Liu et al. 2023).

A rank holds one run of positions, or the runs that a plan assigns to it, so that all ranks have equal work (for one
document as in Brandon et al. 2023, see :mod:`...ops.attention.ring_plan`). A pair of a run of queries and a run of keys
is a block; blocks that are masked as a whole are skipped. Every rank has the ids of all positions, which decide that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...compat.torch_codegen import SHIPPED
from ...core.precision import widened
from ...ops.attention.blocks import Block
from ...ops.attention.ring_plan import Held, Runs, positions_of
from ...ops.attention.tiles import AttentionInputs, AttentionTiles, Ids, Total
from .transport import Transport

POSITIONS = 2  # the dim of positions in q, k and v


@dataclass(frozen=True)
class Circle:
    """A rank's place in a ring: ``index`` among the ``size`` ranks of an axis."""

    transport: Transport
    axis: str
    size: int
    index: int
    at: int

    def passed(self, xs: Sequence[Tensor], back: int = -1) -> Callable[[], list[Tensor]]:
        """Start to send ``xs`` to the next rank (or ``back`` by so many ranks), and to receive those of another."""
        if back % self.size == 0:
            return lambda: list(xs)
        sources = tuple((i + back) % self.size for i in range(self.size))
        waits = [self.transport.permute(x, self.axis, sources, self.at) for x in xs]
        return lambda: [wait() for wait in waits]


@dataclass(frozen=True)
class Ring(Circle):
    """A ring that computes attention. ``runs``: the runs of positions of each rank."""

    tiles: AttentionTiles
    runs: Sequence[Runs]

    def unmasked_blocks(self, owner: int, ids: Ids, of: int | None = None) -> Iterator[tuple[int, int, Block]]:
        """Yield the blocks of this rank's queries (or of rank ``of``) and ``owner``'s keys that are not masked.

        Each comes with the indices of its runs of queries and keys.
        """
        for i, (row, rows) in enumerate(self.runs[self.index if of is None else of]):
            for j, (col, cols) in enumerate(self.runs[owner]):
                block = Block(row, rows, col, cols)
                if ids.sees(self.tiles.sight, block):
                    yield i, j, block

    def count_steps(self, ids: Ids) -> int:
        """Return the number of steps in which some rank has a block, the same on all ranks.

        It is the size of the ring, and less where a window or documents are short.

        >>> from quintnet_compiler.ops.attention.blocks import Sight
        >>> Ring(None, "cp", 8, 0, 0, AttentionTiles(1.0, Sight(True, 5), 1), runs_of(None, 8, 4)).count_steps(Ids())
        2
        """
        for step in reversed(range(1, self.size)):
            if any(True for i in range(self.size) for _ in self.unmasked_blocks((i - step) % self.size, ids, i)):
                return step + 1
        return 1

    def split_runs(self, x: Tensor, owner: int | None = None) -> Sequence[Tensor]:
        """Return ``x``, of this rank or of ``owner``, split into its runs."""
        sizes = [count for _, count in self.runs[self.index if owner is None else owner]]
        return SHIPPED.split(x, sizes, POSITIONS)


def runs_of(plan: Tensor | None, size: int, length: int) -> list[Runs]:
    """Return the runs of a ring's ranks with ``length`` positions each; in order without a plan (or its values)."""
    held: Held = [[rank] for rank in range(size)] if plan is None or plan.is_meta else plan.tolist()
    return positions_of(held, length // len(held[0]))


def ring_forward(ring: Ring, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Return the attention of this rank's queries, and the log-sum-exp of each, in the order of the runs."""
    q, k, v = inputs.q, inputs.k, inputs.v
    ids = inputs.ids
    travelling = [k, v]
    queries = ring.split_runs(q)
    totals = [Total(x, v.shape[3]) for x in queries]
    steps = ring.count_steps(ids)
    for step in range(steps):
        coming = ring.passed(travelling) if step < steps - 1 else None
        owner = (ring.index - step) % ring.size
        keys, values = (ring.split_runs(x, owner) for x in travelling)
        for i, j, block in ring.unmasked_blocks(owner, ids):
            ring.tiles.forward(block, queries[i], keys[j], values[j], ids, totals[i])
        if coming is not None:
            travelling = coming()
    outs, logs = zip(*(total.finished() for total in totals), strict=True)
    return SHIPPED.cat(outs, POSITIONS), SHIPPED.cat(logs, POSITIONS)


def ring_backward(
    ring: Ring, inputs: AttentionInputs, grad: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v. Those of keys and values are passed around with them, and to their owner."""
    q, k, v = inputs.q, inputs.k, inputs.v
    travelling = [k, v]
    query_parts = list(zip(*(ring.split_runs(x) for x in (grad, q, out, lse)), strict=True))
    query_grads = _zeros(ring.split_runs(q), widened(q.dtype))
    arriving: Callable[[], list[Tensor]] | None = None
    steps = ring.count_steps(inputs.ids)
    for step in range(steps):
        coming = ring.passed(travelling) if step < steps - 1 else None
        owner = (ring.index - step) % ring.size
        terms = _key_value_grads(ring, owner, travelling, inputs.ids, query_parts, query_grads)
        gathered = terms if arriving is None else [a + b for a, b in zip(arriving(), terms, strict=True)]
        arriving = ring.passed(gathered) if step < steps - 1 else ring.passed(gathered, back=step)
        if coming is not None:
            travelling = coming()
    assert arriving is not None
    dk, dv = (x.to(k.dtype) for x in arriving())
    return SHIPPED.cat(query_grads, POSITIONS).to(q.dtype), dk, dv


def _key_value_grads(
    ring: Ring,
    owner: int,
    keys_and_values: Sequence[Tensor],
    ids: Ids,
    query_parts: Sequence[tuple[Tensor, ...]],
    query_grads: Sequence[Tensor],
) -> list[Tensor]:
    """Return the gradients of ``owner``'s keys and values by this rank's queries; add those of queries in place.

    ``query_parts``: for each run of queries, the result's gradient, the queries, the result and its log-sum-exp.
    """
    keys, values = (ring.split_runs(x, owner) for x in keys_and_values)
    key_grads, value_grads = (_zeros(parts, query_grads[0].dtype) for parts in (keys, values))
    for i, j, block in ring.unmasked_blocks(owner, ids):
        targets = query_grads[i], key_grads[j], value_grads[j]
        grad, q, out, lse = query_parts[i]
        ring.tiles.backward(block, grad, q, out, lse, keys[j], values[j], ids, targets)
    return [SHIPPED.cat(grads, POSITIONS) if len(grads) > 1 else grads[0] for grads in (key_grads, value_grads)]


def _zeros(xs: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return zeros in which gradients of ``xs`` are added up."""
    return [SHIPPED.zeros(x.shape, dtype=dtype, device=x.device) for x in xs]
