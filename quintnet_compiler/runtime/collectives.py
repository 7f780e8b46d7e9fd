"""The three collectives of which a graph's are made, over one process group: torch.distributed's own, or messages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .transport import Pending

# torch 2.13 renamed these two; the names before it are deprecated
gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

SMALL = 2**16  # bytes; from here on gloo's own collectives are as fast
MOST_TAGS = 2**30  # after so many messages their tags begin anew


class Collectives(Protocol):
    """Each begins, and ends when it is waited for; what it is given must not change until then. ``later``: whether
    something else is done in between."""

    group: dist.ProcessGroup

    def all_reduce(self, x: Tensor, later: bool) -> Pending:
        """The sum of all ranks' ``x``."""
        ...

    def all_gather(self, x: Tensor, later: bool) -> Pending:
        """All ranks' contiguous ``x``, below each other."""
        ...

    def reduce_scatter(self, x: Tensor, later: bool) -> Pending:
        """This rank's run of rows of the sum of all ranks' contiguous ``x``."""
        ...


class Native:
    """What the backend (NCCL) has."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size = group, group.size()

    def all_reduce(self, x: Tensor, later: bool) -> Pending:
        out = x.clone(memory_format=torch.contiguous_format)
        work = dist.all_reduce(out, group=self.group, async_op=later)
        return pending([work], None, lambda: out)

    def all_gather(self, x: Tensor, later: bool) -> Pending:
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:])) if x.dim() else x.new_empty(self.size)
        work = gather_single(out, x, group=self.group, async_op=later)
        return pending([work], x, lambda: out)

    def reduce_scatter(self, x: Tensor, later: bool) -> Pending:
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        work = scatter_single(out, x, group=self.group, async_op=later)
        return pending([work], x, lambda: out)


class Messages:
    """Every rank sends to every other what that one needs, and adds up in the order of ranks: as much traffic as a
    ring, in one step. Gloo hands its collectives to other threads, which takes longer than a small message does."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size, self.rank = group, group.size(), group.rank()
        self.native = Native(group)
        self.tags = itertools.count(1)

    def all_reduce(self, x: Tensor, later: bool) -> Pending:
        if x.nbytes > SMALL or self.size > 2:  # whole tensors to many would be more traffic
            return self.native.all_reduce(x, later)
        x = x.contiguous()
        return self._summed(x, [x] * self.size)

    def all_gather(self, x: Tensor, later: bool) -> Pending:
        if x.nbytes > SMALL:
            return self.native.all_gather(x, later)
        out = x.new_empty((self.size, *x.shape))
        works = self._exchange([x] * self.size, out.unbind(0))
        out[self.rank].copy_(x)
        return pending(works, x, lambda: out.flatten(0, 1) if x.dim() else out)

    def reduce_scatter(self, x: Tensor, later: bool) -> Pending:
        if x.nbytes > SMALL:
            return self.native.reduce_scatter(x, later)
        return self._summed(x, x.chunk(self.size))

    def _summed(self, x: Tensor, pieces: Sequence[Tensor]) -> Pending:
        """The sum of what all ranks have for this one; ``pieces[r]`` of ``x`` is for rank r."""
        got = [piece if rank == self.rank else torch.empty_like(piece) for rank, piece in enumerate(pieces)]
        works = self._exchange(pieces, got)

        def total() -> Tensor:
            first, second, *more = got
            found = first + second
            for one in more:
                found += one
            got.clear()
            return found

        return pending(works, x, total)

    def _exchange(self, sent: Sequence[Tensor], got: Sequence[Tensor]) -> list[Any]:
        tag = next(self.tags) % MOST_TAGS + 1  # 0 is that of other messages
        others = [rank for rank in range(self.size) if rank != self.rank]
        works: list[Any] = [self.group.recv([got[rank]], rank, tag) for rank in others]
        return works + [self.group.send([sent[rank]], rank, tag) for rank in others]


def collectives(group: dist.ProcessGroup) -> Collectives:
    return Messages(group) if dist.get_backend(group) == "gloo" else Native(group)


def pending(works: Sequence[Any], given: Tensor | None, made: Callable[[], Any]) -> Pending:
    """A work is None where it is done; ``given`` lives until then."""
    kept = [given]

    def wait() -> Any:
        for work in works:
            if work is not None:
                work.wait()
        kept.clear()
        return made()

    return wait
