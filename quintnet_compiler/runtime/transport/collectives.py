"""The collectives of one process group that add up and join tensors: the backend's own, or exchanges in their place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...compat.distributed import all_gather, reduce_scatter
from .shared_memory import LARGEST, MemoryLink, link
from .transport import Pending

PIECES, PIECE_BYTES = 16, 2**20  # at most so many in one message, of so many bytes at least: else one copy costs less


class Native:
    """The collectives of the backend.

    Each takes contiguous tensors, which must not change until it is waited for. ``later``: whether something else is
    done in between.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size, self.rank = group, group.size(), group.rank()

    def add(self, x: Tensor, later: bool = True) -> Pending:
        """Makes ``x`` the sum of all ranks'."""
        return pending(dist.all_reduce(x, group=self.group, async_op=later), x, lambda: x)

    def all_reduce(self, x: Tensor, later: bool) -> Pending:
        """The sum of all ranks' ``x``."""
        return self.add(x.clone(), later)

    def all_gather(self, x: Tensor, into: Tensor, later: bool) -> Pending:
        """All ranks' ``x`` in ``into``, one after the other. ``x`` may lie there already."""
        return pending(all_gather(into, x, group=self.group, async_op=later), x, lambda: into)

    def reduce_scatter(self, x: Tensor, into: Tensor, later: bool) -> Pending:
        """This rank's run of the sum of all ranks' ``x`` in ``into``, which may be that run of ``x``."""
        return pending(reduce_scatter(into, x, group=self.group, async_op=later), x, lambda: into)

    def pieces(self, x: Tensor, dim: int, parts: int) -> Sequence[Tensor] | None:
        """The runs of contiguous memory of which ``x`` consists, cut along the dims before ``dim``: where ranks join or
        cut that, they can do it with each run alone, which saves a copy of the whole. None: where it saves none."""
        count = math.prod(x.shape[:dim])
        if parts > 1 or not 1 < count <= PIECES or x.nbytes < count * PIECE_BYTES:
            return None
        return x.contiguous().flatten(0, dim - 1).unbind()

    def all_gather_each(self, xs: Sequence[Tensor], into: Sequence[Tensor], later: bool) -> Pending:
        """As :meth:`all_gather` of each of ``xs``, in one message."""
        work = self.group.allgather_into_tensor_coalesced(list(into), list(xs))
        return pending(work, xs, lambda: into)

    def reduce_scatter_each(self, xs: Sequence[Tensor], into: Sequence[Tensor], later: bool) -> Pending:
        """As :meth:`reduce_scatter` of each of ``xs``, in one message."""
        work = self.group.reduce_scatter_tensor_coalesced(list(into), list(xs))
        return pending(work, xs, lambda: into)

    def all_to_all(
        self, x: Tensor, into: Tensor, later: bool, receives: list[int] | None = None, sends: list[int] | None = None
    ) -> Pending:
        """To each rank its run of ``x``, in ``into`` what comes from each: equal runs, or of so many rows."""
        work = dist.all_to_all_single(into, x, receives, sends, group=self.group, async_op=later)
        return pending(work, x, lambda: into)

    def permute(self, x: Tensor, sources: tuple[int, ...]) -> Pending:
        """Return the ``x`` of the rank that ``sources`` names at this rank's place."""
        if sources[self.rank] == self.rank:
            return lambda: x
        ranks, got = dist.get_process_group_ranks(self.group), torch.empty_like(x)
        moves = [
            dist.P2POp(dist.isend, x, ranks[sources.index(self.rank)], self.group),
            dist.P2POp(dist.irecv, got, ranks[sources[self.rank]], self.group),
        ]
        works, kept = dist.batch_isend_irecv(moves), [x]  # alive until it is there

        def wait() -> Tensor:
            for work in works:
                work.wait()
            kept.clear()
            return got

        return wait


class Exchanges(Native):
    """Gloo sums in a ring, each of whose steps wakes several threads. Where no rank has more to send for it, all send
    to all in one step, and what arrives is added up here, in the order of ranks."""

    def add(self, x: Tensor, later: bool = True) -> Pending:
        if self.size > 2:
            return super().add(x, later)
        return self._exchanged(x, torch.empty_like(x), later, x.add_)

    def all_reduce(self, x: Tensor, later: bool) -> Pending:
        if self.size > 2:
            return super().all_reduce(x, later)
        return self._exchanged(x, torch.empty_like(x), later, lambda got: got.add_(x))

    def all_gather(self, x: Tensor, into: Tensor, later: bool) -> Pending:
        if self.size > 2:
            return super().all_gather(x, into, later)
        halves = into.view(-1).chunk(2)
        mine, other = halves[self.rank], halves[1 - self.rank]
        if mine.data_ptr() != x.data_ptr():
            mine.copy_(x.view(-1))
        return self._exchanged(x, other, later, lambda _: into)

    def reduce_scatter(self, x: Tensor, into: Tensor, later: bool) -> Pending:
        got = torch.empty_like(x)
        work = dist.all_to_all_single(got.view(-1), x.view(-1), group=self.group, async_op=later)
        terms = got.view(self.size, *into.shape)
        return pending(work, x, lambda: torch.sum(terms, 0, out=into))

    def pieces(self, x: Tensor, dim: int, parts: int) -> None:
        """None: each would be a message of its own."""

    def all_gather_each(self, xs: Sequence[Tensor], into: Sequence[Tensor], later: bool) -> Pending:
        begun = [self.all_gather(x, whole, True) for x, whole in zip(xs, into, strict=True)]
        return lambda: [each() for each in begun]

    def permute(self, x: Tensor, sources: tuple[int, ...]) -> Pending:
        # gloo's messages keep their caller until they are under way; its collectives have threads of their own, and
        # need ranks that only get what they have, too
        got, count = torch.empty_like(x), x.numel()
        gets = [count if rank == sources[self.rank] else 0 for rank in range(self.size)]
        sends = [count if source == self.rank else 0 for source in sources]
        work = dist.all_to_all_single(got.view(-1), x.view(-1), gets, sends, group=self.group, async_op=True)
        return pending(work, x, lambda: got)

    def _exchanged(self, x: Tensor, got: Tensor, later: bool, made: Callable[[Tensor], Tensor]) -> Pending:
        """Return what ``made`` returns for the other rank's ``x``."""
        counts = [x.numel(), 0] if self.rank else [0, x.numel()]
        work = dist.all_to_all_single(got.view(-1), x.view(-1), counts, counts, group=self.group, async_op=later)
        return pending(work, x, lambda: made(got))


class SharedMemory(Exchanges):
    """Between two ranks of one host, what is not large goes through memory that both have."""

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
        return self.link.exchange(x.view(-1), lambda got: (halves[1 - self.rank].copy_(got), into)[1])

    def reduce_scatter(self, x: Tensor, into: Tensor, later: bool) -> Pending:
        halves = x.view(2, *into.shape)
        if not _fits(into):
            return super().reduce_scatter(x, into, later)
        return self.link.exchange(halves[1 - self.rank], lambda got: torch.add(halves[self.rank], got, out=into))

    def permute(self, x: Tensor, sources: tuple[int, ...]) -> Pending:
        if sources[self.rank] == self.rank or not _fits(x):
            return super().permute(x, sources)
        return self.link.exchange(x, torch.clone)


def _fits(x: Tensor) -> bool:
    return x.is_cpu and x.nbytes <= LARGEST


def collectives(group: dist.ProcessGroup) -> Native:
    """Return the way in which the ranks of ``group`` add up and join tensors. All of them must call this."""
    if dist.get_backend(group) != "gloo":
        return Native(group)
    found = link(group) if group.size() == 2 else None
    return Exchanges(group) if found is None else SharedMemory(group, found)


def pending(work: dist.Work | None, given: Any, made: Callable[[], Any]) -> Pending:
    """Return a wait for ``work``, which is None where it is done; ``given`` lives until then."""
    kept = [given]

    def wait() -> Any:
        if work is not None:
            work.wait()
        kept.clear()
        return made()

    return wait
