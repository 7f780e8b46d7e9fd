"""The backend ``"emulated"`` of torch.distributed: collectives on emulated accelerators, with NCCL's rules.

Values travel through gloo, on host memory, in the thread of the communicator's stream. What a collective makes is
poison from the moment it starts until it ends; what it reads must not change meanwhile. ``init_process_group(...,
device_id=torch.device("emulated", i))`` makes one communicator for each group, as NCCL's eager mode; without it,
communicators are made at first use, one for each pair of ranks that send and receive.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .device import NAME, install

Move = tuple[str, list[Tensor], list[Tensor], list[int], list[int]]  # kind, outputs, inputs, numbers, more numbers
HALF = (torch.float16, torch.bfloat16)


class Exchange:
    """Carries out what the streams of a group's communicators come to. Tensors are host memory.

    Sums of 16-bit values are computed in float32.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        self.store, self.rank, self.size, self.timeout = store, rank, size, timeout
        self.gloo = dist.ProcessGroupGloo(dist.PrefixStore("values", store), rank, size, timeout)

    def split(self, store: dist.Store, rank: int, size: int) -> Exchange:
        """That of a part of the group."""
        return Exchange(store, rank, size, self.timeout)

    def meet(self, communicator: str, ranks: list[int]) -> None:
        """Return when all ``ranks`` are here: hosts make a communicator together.

        Raises:
            RuntimeError: if one of them is elsewhere until the time is up. On NCCL that is a hang.
        """
        self.store.set(f"{communicator}/{self.rank}", "here")
        try:
            self.store.wait([f"{communicator}/{rank}" for rank in ranks], self.timeout)
        except dist.DistStoreError:
            raise RuntimeError(
                f"NCCL would hang: rank {self.rank} makes the communicator {communicator} of ranks {ranks}, and not "
                "all of them do"
            ) from None

    def carry_out(self, moves: Sequence[Move]) -> None:
        """One collective, or a batch of transfers between ranks, which run together."""
        read = [[x.clone() for x in inputs] for _, _, inputs, _, _ in moves]
        for _, outputs, _, _, _ in moves:
            for x in outputs:
                poison(x)
        with as_nccl_says(self, moves[0]):
            ends = [BEGIN[move[0]](self, move, given) for move, given in zip(moves, read, strict=True)]
            found = [end() for end in ends]
        for (kind, outputs, inputs, _, _), given, made in zip(moves, read, found, strict=True):
            for x, was in zip(inputs, given, strict=True):
                if not any(overlap(x, y) for y in outputs) and not same(x, was):
                    raise RuntimeError(f"{kind}: what it reads was changed while it was under way")
            for x, y in zip(outputs, made, strict=True):
                x.copy_(y.view(x.shape))


@contextlib.contextmanager
def as_nccl_says(group: Exchange, move: Move) -> Iterator[None]:
    """What gloo says of ranks that are late or gone, in the words of ProcessGroupNCCL."""
    try:
        yield
    except RuntimeError as error:
        limit, size = group.timeout.total_seconds() * 1000, sum(x.numel() for x in move[2])
        if "Timed out" in str(error) or "timeout" in str(error):
            raise RuntimeError(
                f"[Rank {group.rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, "
                f"OpType={move[0].upper()}, NumelIn={size}, NumelOut={size}, Timeout(ms)={limit:.0f}) ran for "
                f"{limit + 81:.0f} milliseconds before timing out."
            ) from None
        raise RuntimeError(
            "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.hpp:268, remote process exited or there was "
            "a network error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a "
            f"remote process exiting prematurely.\nLast error:\n{error}"
        ) from None


def poison(x: Tensor) -> None:
    """All bits set: NaN, or -1."""
    if x.is_contiguous():
        x.view(-1).view(torch.uint8).fill_(255)
    else:
        x.fill_(float("nan") if x.is_floating_point() else -1)


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether they lie in the same memory, as far as runs of it tell."""
    return x.data_ptr() < y.data_ptr() + y.nbytes and y.data_ptr() < x.data_ptr() + x.nbytes


def same(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x, y) or (torch.equal(x.isnan(), y.isnan()) and torch.equal(x.nan_to_num(), y.nan_to_num()))


def wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF else x


End = Callable[[], Sequence[Tensor]]  # waits, and gives what the outputs become


def _all_reduce(group: Exchange, move: Move, given: list[Tensor]) -> End:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.RedOpType(move[3][0]))
    sums = [wide(x).contiguous() for x in given]
    works = [group.gloo.allreduce([x], options) for x in sums]

    def end() -> Sequence[Tensor]:
        for work in works:
            work.wait()
        return [x.to(y.dtype) for x, y in zip(sums, given, strict=True)]

    return end


def _broadcast(group: Exchange, move: Move, given: list[Tensor]) -> End:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = move[3][0], 0
    sent = [x.contiguous() for x in given]
    works = [group.gloo.broadcast([x], options) for x in sent]

    def end() -> Sequence[Tensor]:
        for work in works:
            work.wait()
        return sent

    return end


def _gathered(group: Exchange, x: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(group.size)]
    group.gloo.allgather([parts], [x]).wait()
    return parts


def _all_gather(group: Exchange, move: Move, given: list[Tensor]) -> End:
    return lambda: _gathered(group, given[0].contiguous())


def _all_gather_into_tensor(group: Exchange, move: Move, given: list[Tensor]) -> End:
    return lambda: [torch.cat([x.reshape(-1) for x in _gathered(group, given[0].contiguous())])]


def _gather(group: Exchange, move: Move, given: list[Tensor]) -> End:
    options = dist.GatherOptions()
    options.rootRank = move[3][0]

    def end() -> Sequence[Tensor]:
        x = given[0].contiguous()
        parts = [[torch.empty_like(x) for _ in range(group.size)]] if group.rank == options.rootRank else []
        group.gloo.gather(parts, [x], options).wait()
        return parts[0] if parts else []

    return end


def _scatter(group: Exchange, move: Move, given: list[Tensor]) -> End:
    options = dist.ScatterOptions()
    options.rootRank = move[3][0]

    def end() -> Sequence[Tensor]:
        part = torch.empty_like(move[1][0], memory_format=torch.contiguous_format)
        group.gloo.scatter([part], [[x.contiguous() for x in given]] if given else [], options).wait()
        return [part]

    return end


def _reduce_scatter(group: Exchange, move: Move, given: list[Tensor]) -> End:
    def end() -> Sequence[Tensor]:
        total = wide(given[0]).clone().reshape(-1)
        group.gloo.allreduce([total]).wait()
        return [total.view(group.size, -1)[group.rank].to(given[0].dtype)]

    return end


def _all_to_all(group: Exchange, move: Move, given: list[Tensor]) -> End:
    def end() -> Sequence[Tensor]:
        _, (output,), _, receives, sends = move
        made = torch.empty_like(output)
        group.gloo.alltoall_base(made, given[0].contiguous(), receives, sends).wait()
        return [made]

    return end


def _barrier(group: Exchange, move: Move, given: list[Tensor]) -> End:
    def end() -> Sequence[Tensor]:
        group.gloo.barrier().wait()
        return []

    return end


def _send(group: Exchange, move: Move, given: list[Tensor]) -> End:
    sent = given[0].contiguous()
    work = group.gloo.send([sent], move[3][0], 0)

    def end() -> Sequence[Tensor]:
        work.wait()
        return []

    return end


def _recv(group: Exchange, move: Move, given: list[Tensor]) -> End:
    got = torch.empty_like(move[1][0], memory_format=torch.contiguous_format)
    work = group.gloo.recv([got], move[3][0], 0)

    def end() -> Sequence[Tensor]:
        work.wait()
        return [got]

    return end


BEGIN: Mapping[str, Callable[[Exchange, Move, list[Tensor]], End]] = MappingProxyType(
    {
        "all_reduce": _all_reduce,
        "broadcast": _broadcast,
        "all_gather": _all_gather,
        "all_gather_into_tensor": _all_gather_into_tensor,
        "gather": _gather,
        "scatter": _scatter,
        "reduce_scatter_tensor": _reduce_scatter,
        "all_to_all_single": _all_to_all,
        "barrier": _barrier,
        "send": _send,
        "recv": _recv,
    }
)


def register() -> None:
    """Make ``"emulated"`` a backend of torch.distributed, for the device of that name."""
    extension: Any = install().extension

    def backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        return extension.Backend(rank, size, Exchange(store, rank, size, timeout))

    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, backend, devices=[NAME])
        dist.Backend.backend_capability[dist.Backend.GLOO].append(NAME)  # groups of gloo have CUDA as a device, too
