"""Reductions and gathers of one process group: the backend's own, or exchanges in their place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ...compat.distributed import all_gather, reduce_scatter
from ...compat.torch_codegen import SHIPPED
from .shared_memory import MAX_MESSAGE_BYTES, MemoryLink, link
from .transport import Pending

MAX_PIECES = 16  # of one message; with more, a copy of the whole tensor costs less
MIN_PIECE_BYTES = 2**20  # with smaller pieces, a copy of the whole tensor costs less


class Native:
    """The collectives of the backend.

    Each takes contiguous tensors, which must not change until it is waited for. ``later``: whether the caller does
    something else before it waits.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size, self.rank = group, group.size(), group.rank()

    def add(self, x: Tensor, later: bool = True) -> Pending:
        """Replace ``x`` by the sum of all ranks' ``x``."""
        return pending(dist.all_reduce(x, group=self.group, async_op=later), x, lambda: x)

    def all_reduce(self, x: Tensor, later: bool) -> Pending:
        """Return the sum of all ranks' ``x``."""
        return self.add(x.clone(), later)

    def all_gather(self, x: Tensor, into: Tensor, later: bool) -> Pending:
        """Write all ranks' ``x`` to ``into``, one after the other; ``x`` may be this rank's part of it."""
        return pending(all_gather(into, x, group=self.group, async_op=later), x, lambda: into)

    def reduce_scatter(self, x: Tensor, into: Tensor, later: bool) -> Pending:
        """Write this rank's run of the sum of all ranks' ``x`` to ``into``, which may be that run of ``x``."""
        return pending(reduce_scatter(into, x, group=self.group, async_op=later), x, lambda: into)

    def pieces(self, x: Tensor, dim: int, parts: int) -> Sequence[Tensor] | None:
        """Return the contiguous runs of ``x``, cut along the dims before ``dim``, or None.

        Ranks that gather or scatter along ``dim`` can do so with each run by itself, which saves a copy of the whole.
        None: it would not be faster.
        """
        count = math.prod(x.shape[:dim])
        if parts > 1 or not 1 < count <= MAX_PIECES or x.nbytes < count * MIN_PIECE_BYTES:
            return None
        return x.contiguous().flatten(0, dim - 1).unbind()

    def all_gather_each(self, xs: Sequence[Tensor], into: Sequence[Tensor], later: bool) -> Pending:
        """Gather each of ``xs`` as :meth:`all_gather` does, in one message."""
        work = self.group.allgather_into_tensor_coalesced(list(into), list(xs))
        return pending(work, xs, lambda: into)

    def reduce_scatter_each(self, xs: Sequence[Tensor], into: Sequence[Tensor], later: bool) -> Pending:
        """Reduce each of ``xs`` as :meth:`reduce_scatter` does, in one message."""
        work = self.group.reduce_scatter_tensor_coalesced(list(into), list(xs))
        return pending(work, xs, lambda: into)

    def all_to_all(
        self, x: Tensor, into: Tensor, later: bool, receives: list[int] | None = None, sends: list[int] | None = None
    ) -> Pending:
        """Send each rank its run of ``x``, and write the runs that arrive to ``into``.

        Runs are equally long, or have the numbers of rows in ``sends`` and ``receives``.
        """
        work = dist.all_to_all_single(into, x, receives, sends, group=self.group, async_op=later)
        return pending(work, x, lambda: into)

    def permute(self, x: Tensor, sources: tuple[int, ...]) -> Pending:
        """Return the ``x`` of rank ``sources[self.rank]``."""
        if sources[self.rank] == self.rank:
            return lambda: x
        ranks, received = dist.get_process_group_ranks(self.group), SHIPPED.empty_like(x)
        moves = [
            dist.P2POp(dist.isend, x, ranks[sources.index(self.rank)], self.group),
            dist.P2POp(dist.irecv, received, ranks[sources[self.rank]], self.group),
        ]
        works = dist.batch_isend_irecv(moves)
        sent = [x]  # alive until the wait

        def wait() -> Tensor:
            for work in works:
                work.wait()
            sent.clear()
            return received

        return wait


class Exchanges(Native):
    """Collectives over gloo that exchange whole tensors in one step, and add them up in the order of ranks.

    Gloo's own all-reduce goes around a ring, and each of its steps wakes several threads. Exchanges are used where no
    rank sends more than in that ring.
    """

    def add(self, x: Tensor, later: bool = True) -> Pending:
        if self.size > 2:
            return super().add(x, later)
        return self._exchange_pair(x, SHIPPED.empty_like(x), later, x.add_)

    def all_reduce(self, x: Tensor, later: bool) -> Pending:
        if self.size > 2:
            return super().all_reduce(x, later)
        return self._exchange_pair(x, SHIPPED.empty_like(x), later, lambda received: received.add_(x))

    def all_gather(self, x: Tensor, into: Tensor, later: bool) -> Pending:
        if self.size > 2:
            return super().all_gather(x, into, later)
        halves = into.view(-1).chunk(2)
        mine, other = halves[self.rank], halves[1 - self.rank]
        if mine.data_ptr() != x.data_ptr():
            mine.copy_(x.view(-1))
        return self._exchange_pair(x, other, later, lambda _: into)

    def reduce_scatter(self, x: Tensor, into: Tensor, later: bool) -> Pending:
        received = SHIPPED.empty_like(x)
        work = dist.all_to_all_single(received.view(-1), x.view(-1), group=self.group, async_op=later)
        terms = received.view(self.size, *into.shape)
        return pending(work, x, lambda: SHIPPED.sum(terms, 0, out=into))

    def pieces(self, x: Tensor, dim: int, parts: int) -> None:
        """Return None: each piece would need a message."""

    def all_gather_each(self, xs: Sequence[Tensor], into: Sequence[Tensor], later: bool) -> Pending:
        waits = [self.all_gather(x, whole, True) for x, whole in zip(xs, into, strict=True)]
        return lambda: [wait() for wait in waits]

    def permute(self, x: Tensor, sources: tuple[int, ...]) -> Pending:
        # gloo's point-to-point calls block until a message is under way; its collectives run in threads, but need
        # every rank, also those that only send or only receive
        received, count = SHIPPED.empty_like(x), x.numel()
        receives = [count if rank == sources[self.rank] else 0 for rank in range(self.size)]
        sends = [count if source == self.rank else 0 for source in sources]
        work = dist.all_to_all_single(received.view(-1), x.view(-1), receives, sends, group=self.group, async_op=True)
        return pending(work, x, lambda: received)

    def _exchange_pair(self, x: Tensor, received: Tensor, later: bool, finish: Callable[[Tensor], Tensor]) -> Pending:
        """Exchange ``x`` with the other rank, and return ``finish(received)``."""
        counts = [x.numel(), 0] if self.rank else [0, x.numel()]
        work = dist.all_to_all_single(received.view(-1), x.view(-1), counts, counts, group=self.group, async_op=later)
        return pending(work, x, lambda: finish(received))


class SharedMemory(Exchanges):
    """Collectives of two ranks of one host: small tensors go through shared memory."""

    def __init__(self, group: dist.ProcessGroup, link: MemoryLink) -> None:
        super().__init__(group)
        self.link = link

    def add(self, x: Tensor, later: bool = True) -> Pending:
        return self.link.exchange(x, x.add_) if _fits(x) else super().add(x, later)

    def all_reduce(self, x: Tensor, later: bool) -> Pending:
        return self.link.exchange(x, x.add) if _fits(x) else super().all_reduce(x, later)

    def all_gather(self, x: Tensor, into: Tensor, later: bool) -> Pending:
        if not _fits(x):
            return super().all_gather(x, into, later)
        halves = into.view(2, -1)
        if halves[self.rank].data_ptr() != x.data_ptr():
            halves[self.rank].copy_(x.view(-1))
        return self.link.exchange(x.view(-1), lambda received: (halves[1 - self.rank].copy_(received), into)[1])

    def reduce_scatter(self, x: Tensor, into: Tensor, later: bool) -> Pending:
        halves = x.view(2, *into.shape)
        if not _fits(into):
            return super().reduce_scatter(x, into, later)
        return self.link.exchange(
            halves[1 - self.rank], lambda received: SHIPPED.add(halves[self.rank], received, out=into)
        )

    def permute(self, x: Tensor, sources: tuple[int, ...]) -> Pending:
        if sources[self.rank] == self.rank or not _fits(x):
            return super().permute(x, sources)
        return self.link.exchange(x, SHIPPED.clone)


def _fits(x: Tensor) -> bool:
    return x.is_cpu and x.nbytes <= MAX_MESSAGE_BYTES


def collectives(group: dist.ProcessGroup) -> Native:
    """Return the collectives of ``group``. All of its ranks must call this."""
    if dist.get_backend(group) != "gloo":
        return Native(group)
    memory_link = link(group) if group.size() == 2 else None
    return Exchanges(group) if memory_link is None else SharedMemory(group, memory_link)


def pending(work: dist.Work | None, inputs: Any, result: Callable[[], Any]) -> Pending:
    """Return a wait for ``work`` (None: it is done) that returns ``result()``; ``inputs`` stay alive until then."""
    alive = [inputs]

    def wait() -> Any:
        if work is not None:
            work.wait()
        alive.clear()
        return result()

    return wait
