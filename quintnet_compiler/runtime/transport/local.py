"""All ranks in one process, in lockstep: the reference semantics, the debugger, and the default without a launcher.

Each rank runs in a greenlet and gives way when it meets communication. When all ranks of a collective have arrived it
is carried out; ranks that meet different collectives are reported at once, and so is a rank that waits forever. A
rank that is alone has no other to give way to, and runs where it is called.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from torch import Tensor

from ...compat.torch_codegen import SHIPPED
from ...core import slices
from ...core.errors import RunError
from ...core.mesh import Mesh
from ...ops.collectives import COLLECTIVES
from .transport import Pending, Wait


@dataclass(frozen=True)
class Rendezvous:
    """A collective ``kind`` over ``ranks`` that a rank waits for, at a place that ``label`` describes.

    ``runs``: how many rows go to each rank, where each rank has another number.
    """

    kind: str
    ranks: tuple[int, ...]
    label: str
    tensor: Tensor
    detail: tuple[Any, ...] = ()
    runs: tuple[int, ...] | None = None

    @property
    def signature(self) -> tuple[Any, ...]:
        """Return what must be equal on all ranks of the collective."""
        shape = tuple(self.tensor.shape) if self.runs is None else tuple(self.tensor.shape[1:])
        return self.kind, self.ranks, shape, self.tensor.dtype, self.detail, self.label

    def __str__(self) -> str:
        return f"{self.label or self.kind} of {tuple(self.tensor.shape)} {self.tensor.dtype} over ranks {self.ranks}"


@dataclass(frozen=True)
class Mail:
    """A receive that a rank waits for: the ``number``-th tensor from ``source`` on ``channel``."""

    source: int
    channel: int
    number: int
    label: str

    def __str__(self) -> str:
        return f"{self.label} from rank {self.source}"


@dataclass
class Channel:
    """Messages of one rank to another: the n-th receive that was posted gets the n-th send, whenever it waits."""

    sent: int = 0
    asked: int = 0
    arrived: dict[int, tuple[Tensor, str]] = field(default_factory=dict)


class LocalWorld:
    """Runs one function per rank until all are done.

    Raises:
        RunError: QN401 if ranks meet different collectives or a transfer has another shape than expected, QN402 if
            ranks wait for something that never comes.
    """

    def __init__(self, mesh: Mesh, sites: Sequence[str] = ()) -> None:
        self.mesh, self.sites = mesh, sites
        self.messages: dict[tuple[int, int, int], Channel] = defaultdict(Channel)
        self.hub = getcurrent()
        self.present = frozenset(range(mesh.size))
        self.transports: dict[int, LocalTransport] = {}

    def transport(self, rank: int) -> LocalTransport:
        """Return a rank's side of this world."""
        if rank not in self.transports:
            self.transports[rank] = LocalTransport(self, rank)
        return self.transports[rank]

    def run_ranks(self, functions: Mapping[int, Callable[[LocalTransport], Any]]) -> dict[int, Any]:
        """Run ``functions[rank](transport)`` of every rank, in lockstep, and return their results by rank.

        Where some ranks of the mesh are absent, the others stand for them in sums.
        """
        self.hub, self.present = getcurrent(), frozenset(functions)
        self.messages.clear()
        if len(functions) == 1:
            return {rank: function(self.transport(rank)) for rank, function in functions.items()}
        ranks = {rank: greenlet(function, self.hub) for rank, function in functions.items()}
        waits: dict[int, Rendezvous | Mail] = {}
        results: dict[int, Any] = {}
        ready: dict[int, Any] = {rank: self.transport(rank) for rank in ranks}
        try:
            while ready or waits:
                for rank in sorted(ready):
                    answer = ranks[rank].switch(ready.pop(rank))
                    if ranks[rank].dead:
                        results[rank] = answer
                    else:
                        waits[rank] = answer
                self._advance(waits, ready)
                if waits and not ready:
                    raise _stuck(waits)
        finally:
            _end(ranks.values())
        return {rank: results[rank] for rank in functions}

    def meet(self, rank: int, wait: Rendezvous | Mail) -> Any:
        """Return what ``rank`` waits for, once it has arrived."""
        if len(self.present) > 1:
            return self.hub.switch(wait)
        if isinstance(wait, Rendezvous):
            return _carry_out([wait], [0])[0]
        arrived = self.messages[wait.source, rank, wait.channel].arrived
        if wait.number not in arrived:
            raise _stuck({rank: wait})
        return arrived.pop(wait.number)

    def _advance(self, waits: dict[int, Rendezvous | Mail], ready: dict[int, Any]) -> None:
        """Move ranks whose messages arrived, or whose collectives are complete, from ``waits`` to ``ready``."""
        for rank in sorted(waits):
            wait = waits.get(rank)
            if isinstance(wait, Mail):
                arrived = self.messages[wait.source, rank, wait.channel].arrived
                if wait.number in arrived:
                    ready[rank] = arrived.pop(wait.number)
                    del waits[rank]
            elif wait is not None:
                self._try_collective(rank, wait, waits, ready)

    def _try_collective(
        self, rank: int, wait: Rendezvous, waits: dict[int, Rendezvous | Mail], ready: dict[int, Any]
    ) -> None:
        """Carry out the collective that ``rank`` waits for, if all of its ranks are in it."""
        others = [waits.get(other) for other in wait.ranks]
        meetings = [other for other in others if isinstance(other, Rendezvous)]
        if any(isinstance(other, Mail) for other in others) or any(m.signature != wait.signature for m in meetings):
            self._require_match(rank, wait, waits)
        elif len(meetings) == len(others):
            answers = _carry_out(meetings, range(len(meetings)))
            for other, answer in zip(wait.ranks, answers, strict=True):
                ready[other] = answer
                del waits[other]

    def _require_match(self, rank: int, wait: Rendezvous, waits: dict[int, Rendezvous | Mail]) -> None:
        """Raise QN401 if a rank of the collective is in another one together with ``rank``."""
        for other in wait.ranks:
            met = waits.get(other)
            if isinstance(met, Rendezvous) and rank in met.ranks and met.signature != wait.signature:
                raise RunError("QN401", f"rank {rank} is in {wait}\n  rank {other} is in {met}")


def _end(ranks: Iterable[greenlet]) -> None:
    """End ranks that still wait, so that their values are freed."""
    for rank in ranks:
        if rank and not rank.dead:
            rank.throw()


def _stuck(waits: Mapping[int, Rendezvous | Mail]) -> RunError:
    return RunError("QN402", "\n  ".join(f"rank {rank} waits in {wait}" for rank, wait in sorted(waits.items())))


def _carry_out(meetings: list[Rendezvous], wanted: Sequence[int]) -> list[Any]:
    """Return the collective's result on the ranks at ``wanted`` places."""
    return _RESULTS[meetings[0].kind](meetings, wanted)


def _sum(meetings: list[Rendezvous], wanted: Sequence[int]) -> list[Any]:
    total = meetings[0].tensor.clone()
    for meeting in meetings[1:]:
        total = total + meeting.tensor
    return [total.clone() for _ in wanted]


def _gather(meetings: list[Rendezvous], wanted: Sequence[int]) -> list[Any]:
    dim, parts = meetings[0].detail
    return [slices.join([meeting.tensor for meeting in meetings], dim, parts) for _ in wanted]


def _scatter(meetings: list[Rendezvous], wanted: Sequence[int]) -> list[Any]:
    total = meetings[0].tensor
    for meeting in meetings[1:]:
        total = total + meeting.tensor
    dim, parts = meetings[0].detail
    return [slices.slice_of_rank(total, dim, parts, len(meetings), index).clone() for index in wanted]


def _by_meaning(meetings: list[Rendezvous], wanted: Sequence[int]) -> list[Any]:
    name, *options = meetings[0].detail
    meaning = COLLECTIVES[name].meaning
    assert meaning is not None, f"{name} has neither a method nor a meaning"
    tensors = [meeting.tensor for meeting in meetings]
    return [meaning(tensors, index, *options).clone() for index in wanted]


def _exchange_rows(meetings: list[Rendezvous], wanted: Sequence[int]) -> list[Any]:
    runs = [SHIPPED.split(meeting.tensor, list(meeting.runs)) for meeting in meetings if meeting.runs is not None]
    if len(runs) < len(meetings):  # shapes alone
        return [meetings[index].tensor.clone() for index in wanted]
    return [SHIPPED.cat([run[index] for run in runs]) for index in wanted]


def _permute(meetings: list[Rendezvous], wanted: Sequence[int]) -> list[Any]:
    sources = meetings[0].detail
    return [meetings[sources[index]].tensor.clone() for index in wanted]


def _broadcast(meetings: list[Rendezvous], wanted: Sequence[int]) -> list[Any]:
    source = meetings[0].ranks.index(meetings[0].detail[0])
    return [meetings[source].tensor.clone() for _ in wanted]


_RESULTS: Mapping[str, Callable[[list[Rendezvous], Sequence[int]], list[Any]]] = MappingProxyType(
    {
        "sum": _sum,
        "gather": _gather,
        "scatter": _scatter,
        "meant": _by_meaning,
        "rows": _exchange_rows,
        "permute": _permute,
        "broadcast": _broadcast,
    }
)


class LocalTransport:
    """One rank's side of a :class:`LocalWorld`; ``met``: the number of collectives in which other ranks took part."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        self.world, self.rank, self.met = world, rank, 0
        self.place = world.mesh.coordinate(rank)
        self.peers = {axis: world.mesh.peers(rank, [axis]) for axis in world.mesh.names}

    def _meet(
        self,
        kind: str,
        x: Tensor,
        ranks: tuple[int, ...],
        label: str,
        *detail: Any,
        runs: tuple[int, ...] | None = None,
    ) -> Tensor:
        present = tuple(rank for rank in ranks if rank in self.world.present)
        if len(present) == 1 < len(ranks):  # the others do the very same
            meeting = Rendezvous(kind, ranks, label, x, detail, runs)
            result: Tensor = _carry_out([meeting] * len(ranks), [ranks.index(self.rank)])[0]
            return result
        self.met += 1
        answer: Tensor = self.world.meet(self.rank, Rendezvous(kind, present, label, x, detail, runs))
        return answer

    def _site(self, at: int) -> str:
        return f"#{at} {self.world.sites[at]}"

    def _all_reduce(self, x: Tensor, axis: str, at: int) -> Tensor:
        return self._meet("sum", x, self.peers[axis], self._site(at))

    _all_reduce_ = _all_reduce

    def _all_gather(self, x: Tensor, axis: str, dim: int, parts: int, at: int) -> Tensor:
        return self._meet("gather", x, self.peers[axis], self._site(at), dim, parts)

    def _gather_state(self, x: Tensor, axis: str, dim: int, parts: int, at: int) -> Tensor:
        return self._all_gather(x, axis, dim, parts, at)

    def _gather_states(
        self, xs: Sequence[Tensor], axis: str, dims: Sequence[int], parts: Sequence[int], at: int
    ) -> tuple[Tensor, ...]:
        return self._gather_together(xs, axis, dims, parts, at)

    def _reduce_scatter(self, x: Tensor, axis: str, dim: int, parts: int, at: int) -> Tensor:
        return self._meet("scatter", x, self.peers[axis], self._site(at), dim, parts)

    def _gather_together(
        self, xs: Sequence[Tensor], axis: str, dims: Sequence[int], parts: Sequence[int], at: int
    ) -> tuple[Tensor, ...]:
        return tuple(self._all_gather(x, axis, d, n, at) for x, d, n in zip(xs, dims, parts, strict=True))

    def _scatter_together(
        self, xs: Sequence[Tensor], axis: str, dims: Sequence[int], parts: Sequence[int], at: int
    ) -> tuple[Tensor, ...]:
        return tuple(self._reduce_scatter(x, axis, d, n, at) for x, d, n in zip(xs, dims, parts, strict=True))

    def _exchange_rows(
        self, x: Tensor, sends: list[int] | None, receives: list[int] | None, axis: str, at: int
    ) -> Tensor:
        runs = None if sends is None else tuple(sends)
        return self._meet("rows", x, self.peers[axis], self._site(at), runs=runs)

    def run(self, collective: str, *args: Any) -> Any:
        method = getattr(self, f"_{collective}", None)
        if method is not None:
            return method(*args)
        x, axis, *options, at = args
        return self._meet("meant", x, self.peers[axis], self._site(at), collective, *options)

    def start(self, collective: str, *args: Any) -> Pending:
        result = self.run(collective, *args)
        return lambda: result

    def begin_gather(
        self, xs: Sequence[Tensor], axis: str, dims: Sequence[int], parts: Sequence[int], at: int
    ) -> tuple[tuple[Tensor, ...], Callable[[], Any]]:
        return self._gather_states(xs, axis, dims, parts, at), lambda: None

    def permute(self, x: Tensor, axis: str, sources: tuple[int, ...], at: int) -> Wait:
        received = self._meet("permute", x, self.peers[axis], self._site(at), *sources)
        return lambda: received

    def kernels(self, axis: str, device: torch.device, create: object) -> None:
        return None

    def start_sum(self, x: Tensor, ranks: tuple[int, ...], label: str) -> Wait:
        # ranks meet where they wait: compiled code, within which sums begin, cannot be left and entered again
        return lambda: x.copy_(self._meet("sum", x, ranks, label))

    def start_scatter(self, x: Tensor, ranks: tuple[int, ...], label: str) -> Wait:
        part = x.chunk(len(ranks))[ranks.index(self.rank)]
        return lambda: part.copy_(self._meet("scatter", x, ranks, label, 0, 1))

    def broadcast(self, x: Tensor, ranks: tuple[int, ...], source: int, label: str) -> Tensor:
        return self._meet("broadcast", x, ranks, label, source)

    def send(self, x: Tensor, to: int, channel: int, label: str) -> Wait:
        messages = self.world.messages[self.rank, to, channel]
        messages.arrived[messages.sent] = x, label
        messages.sent += 1
        return lambda: x

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int, channel: int, label: str) -> Wait:
        messages = self.world.messages[source, self.rank, channel]
        mail = Mail(source, channel, messages.asked, label)
        messages.asked += 1

        def wait() -> Tensor:
            x, sent = self.world.meet(self.rank, mail)
            if sent != label or tuple(x.shape) != shape or x.dtype != dtype:
                raise RunError(
                    "QN401",
                    f"rank {self.rank} expects {label}: {shape} {dtype} from rank {source}, "
                    f"which sent {sent}: {tuple(x.shape)} {x.dtype}",
                )
            received: Tensor = x
            return received

        return wait
