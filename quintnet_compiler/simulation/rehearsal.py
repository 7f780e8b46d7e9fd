"""Memory of a step: the runtime's own executor takes every action, on values that are only sizes.

So what is kept, and for how long, is decided by the very code that decides it when the program runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.annotations import leaf, memory_of, origin
from ..core.sharding import local_shape
from ..ir.distributed_program import DistributedProgram, RankProgram, Slice, StageProgram
from ..ops.collectives import gather_early, gather_state, gather_states
from ..runtime.execute.executor import Executor, Run
from ..runtime.state.buckets import Bucket
from ..runtime.state.gradients import GradientStore
from ..runtime.transport.disk_copies import SLOTS
from ..runtime.transport.local import LocalTransport, LocalWorld
from ..runtime.transport.transport import Wait
from ..schedules.schedule import Action
from .footprint import Footprints, Output, storage
from .run import Footprint, MemoryPoint

META = torch.device("meta")


class Ledger:
    """Bytes of a rank's values that are alive, on its device or on its host, and of ``gradients`` of parameters;
    ``most``: both when they were the most together."""

    def __init__(self) -> None:
        self.bytes = self.gradients = 0
        self.most = 0, 0

    def note(self, more: int = 0) -> None:
        """The most may be now; ``more``: what a function has beside."""
        now = self.bytes + more, self.gradients
        if sum(now) > sum(self.most):
            self.most = now

    def restart(self) -> None:
        """The most is what there is."""
        self.most = self.bytes, self.gradients


class Allocation:
    """A piece of memory; a rank's ledger counts it while anything refers to it."""

    __slots__ = ("bytes", "ledger")

    def __init__(self, ledger: Ledger | None, size: int) -> None:
        self.ledger, self.bytes = ledger, size
        if ledger is not None:
            ledger.bytes += size

    def __del__(self) -> None:
        if self.ledger is not None:
            self.ledger.bytes -= self.bytes


@dataclass(frozen=True, slots=True)
class Stand:
    """Stands for a tensor."""

    memory: Allocation
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    contiguous: bool = True

    @property
    def dense(self) -> int:
        """Its size without gaps."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class RehearsedTransport(LocalTransport):
    """Transfers of stand-ins: each side counts its own memory. ``processes``: what receives lies in a buffer that is
    made when the receive is posted, and is as large as the value; else it is what was sent."""

    def __init__(self, world: LocalWorld, rank: int, ledger: Ledger, *, processes: bool) -> None:
        super().__init__(world, rank)
        self.ledger, self.processes = ledger, processes

    def send(self, x: Any, to: int, channel: int, label: str) -> Wait:
        if self.processes and not x.contiguous:
            x = Stand(Allocation(self.ledger, x.dense), x.shape, x.dtype)
        told: Any = Stand(Allocation(None, x.memory.bytes), x.shape, x.dtype, x.contiguous)
        super().send(told, to, channel, label)
        return lambda: x

    def start_sum(self, x: Tensor, ranks: tuple[int, ...], label: str) -> Wait:
        return lambda: x  # of gradients, in place

    def start_scatter(self, x: Tensor, ranks: tuple[int, ...], label: str) -> Wait:
        return lambda: x.chunk(len(ranks))[ranks.index(self.rank)]

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int, channel: int, label: str) -> Wait:
        wait: Callable[[], Any] = super().receive(shape, dtype, source, channel, label)
        if self.processes:
            buffer = Stand(Allocation(self.ledger, torch.Size(shape).numel() * dtype.itemsize), shape, dtype)
            return lambda: (wait(), buffer)[1]  # type: ignore[return-value]

        def arrive() -> Any:
            told = wait()
            return Stand(Allocation(self.ledger, told.memory.bytes), shape, dtype, told.contiguous)

        return arrive


class CountedGradients(GradientStore):
    """Adds up nothing. Its transport's ledger knows the memory that the runtime's own code gives gradients on the
    device: of sums, of what ranks add up in another dtype, and of what is no view of a sum."""

    transport: RehearsedTransport

    def begin(self, scale: float = 1.0) -> None:
        super().begin(scale)
        self.known = {id(bucket): _memory(bucket) for bucket in self.buckets}
        lasting = [*self.copies[0], *(bucket.total for bucket in self.buckets if bucket.total is not None)]
        lasts = sum(x.untyped_storage().nbytes() for x in lasting)
        self.transport.ledger.gradients = lasts + sum(self.known.values())

    def add(self, value: str, more: int, product: int) -> None:
        """A term is added; ``more``: the bytes of its function then, see :meth:`Ledger.note`; ``product``: those of the
        term, if it is made for this alone."""
        to, leaving = self.sums[value], self.leaving
        self._first(to)
        self._weigh(to.bucket, more + product)
        self._count(to.bucket)
        self._weigh(to.bucket, more)
        if leaving is not None and leaving is not self.leaving:
            self._weigh(leaving[0], more)

    def _weigh(self, bucket: Bucket, more: int) -> None:
        before, now = self.known[id(bucket)], _memory(bucket)
        self.known[id(bucket)] = now
        self.transport.ledger.gradients += now - before
        self.transport.ledger.note(more)


def _memory(bucket: Bucket) -> int:
    there = (bucket.buffer,) if bucket.moving is None else (bucket.buffer, bucket.moving)
    return sum({storage(x): x.untyped_storage().nbytes() for x in there}.values())


class Rehearsal(Executor):
    """One rank's actions on stand-ins. ``points``: held after, and at most during, each action."""

    def __init__(
        self,
        program: DistributedProgram,
        part: RankProgram,
        transport: RehearsedTransport,
        footprints: Footprints,
        store: CountedGradients | None,
    ) -> None:
        super().__init__(program, part, transport, META, store)
        self.store = store
        self.footprints, self.ledger, self.outside = footprints, transport.ledger, Ledger()
        self.points: dict[Action, MemoryPoint] = {}
        self.in_place = _in_place(program) if transport.processes else frozenset()
        self.work = [(self._noted(handle), action) for handle, action in self.work]

    def _noted(self, handler: Callable[[Action], None]) -> Any:
        def handle(action: Action) -> None:
            self.ledger.restart()
            handler(action)
            self.ledger.note()
            self.points[action] = MemoryPoint(self.ledger.bytes, *self.ledger.most)

        return handle

    def _call(self, stage: StageProgram, label: str, microbatch: int, args: list[Any]) -> tuple[Tensor, ...]:
        found = self.footprints.calls[stage.index, label]
        *parts, (rest, _) = found.parts
        for (value, product), (most, now) in zip(found.adds, parts, strict=True):
            self.ledger.note(most)
            assert self.store is not None
            self.store.add(value, now, product)
        self.ledger.note(rest)
        _, *given = args
        args.clear()
        fresh: dict[int, Allocation] = {}
        piece = stage.pieces[label]
        made = [self._stand(name, out, given, fresh) for name, out in zip(piece.outputs, found.outputs, strict=True)]
        self.outside.note()
        return tuple(made)  # type: ignore[arg-type]

    def _stand(self, name: str, out: Output, given: Sequence[Any], fresh: dict[int, Allocation]) -> Stand:
        if out.argument >= 0:
            memory = given[out.argument].memory
        elif name in self.in_place:
            memory = Allocation(None, out.bytes)  # the state's own
        else:
            if out.fresh not in fresh:
                fresh[out.fresh] = Allocation(self.outside if out.host else self.ledger, out.bytes)
            memory = fresh[out.fresh]
        shape, dtype = self.program.values.get(name, ((), torch.float32))
        return Stand(memory, shape, dtype, out.contiguous)

    def _slice(self, stage: StageProgram, name: str, cut: Slice, microbatch: int) -> Any:
        out = self.footprints.sliced[stage.index, name]
        whole: Any = self.whole[stage.index][cut.source]
        memory = whole.memory if out.argument >= 0 else Allocation(self.ledger, out.bytes)
        return Stand(memory, contiguous=out.contiguous)

    def _require_gradients(self, store: GradientStore) -> None:
        """None are made."""

    def _settled(self, position: int) -> Any:
        return None


def rehearse(program: DistributedProgram, *, processes: bool = True) -> tuple[Footprint, ...]:
    """The memory of the rank at each pipeline place; ranks that differ only along other axes need the same.

    ``processes``: each rank is a process of its own, with buffers for what it receives; else all are in one process.
    """
    footprints = Footprints(program, processes=processes)
    train = any(stage.gradients for stage in program.stages)
    world = LocalWorld(program.mesh, program.sites)
    ranks = [program.mesh.rank({"pp": place}) for place in range(program.mesh["pp"])]
    found: dict[int, Footprint] = {}

    def work(transport: LocalTransport) -> None:
        part = program.rank(transport.rank)
        mine = RehearsedTransport(world, part.rank, Ledger(), processes=processes)
        store = CountedGradients(program, part, mine, META) if train else None
        rehearsal = Rehearsal(program, part, mine, footprints, store)
        known = Stand(Allocation(None, 0))
        there: Any = dict.fromkeys(program.state, known)
        inputs: Any = [known] * len(program.inputs)
        rehearsal.step(there, inputs, Run(train=train, check_finite=False))
        held, before = rehearsal.points, MemoryPoint(0, 0, 0)
        points = []
        for action in part.actions:
            before = held.get(action, MemoryPoint(before.held, before.held, before.gradients))
            points.append(before)
        gradients = {bool(store and store.host): store.nbytes if store else 0}
        state = {host: _state_bytes(program, part, processes=processes, host=host) for host in (False, True)}
        kept, away, disk = state[True] + gradients.get(True, 0), rehearsal.outside.most[0], 0
        if program.disk is not None and away:  # through memory of the host that stays
            staging = (SLOTS + 1) * program.disk.largest
            kept, away, disk = kept + staging, 0, away
        found[part.rank] = Footprint(
            state[False], gradients.get(False, 0), tuple(points), rehearsal.peak_live, away + kept, kept, disk
        )

    with torch.no_grad():
        world.run(dict.fromkeys(ranks, work))
    return tuple(found[rank] for rank in ranks)


def _in_place(program: DistributedProgram) -> frozenset[str]:
    """The values that are gathered in the memory of what ranks store."""
    graph, state = program.source.graph, program.state
    found: set[str] = set()
    for node in graph.nodes:
        made, number = origin(node)
        if node.target is gather_state:
            source: Any = node.args[0]
        elif made.target in (gather_states, gather_early) and made is not node:
            source = made.args[0][number]  # type: ignore[index]
        else:
            if memory_of(node).name in found:  # a view, without its padding
                found.add(node.name)
            continue
        known = leaf(source)
        if source.name in found or (known is not None and state[known.name].in_place):
            found.add(node.name)
    return frozenset(found)


def _state_bytes(program: DistributedProgram, part: RankProgram, *, processes: bool, host: bool) -> int:
    """The rank's parts of parameters, buffers and constants that its stages use, with the room in which they are
    gathered: those on the device, or on the ``host``."""
    mine = {stage.index for stage in part.stages}
    sizes = [axis.size for axis in program.axes]
    total = 0
    for spec in program.state.values():
        if mine & set(spec.stages) and spec.host is host:
            kept = spec.room(sizes) if processes else local_shape(spec.shape, spec.sharding, sizes)
            total += torch.Size(kept).numel() * spec.dtype.itemsize
    return total
