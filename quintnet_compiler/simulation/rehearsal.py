"""Memory of a step: the runtime's own executor takes every action, on values that are only sizes.

So what is kept, and for how long, is decided by the very code that decides it when the program runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..core.annotations import leaf, memory_of, origin
from ..core.sharding import local_shape
from ..ir.distributed_program import DistributedProgram, RankProgram, Slice, StageProgram
from ..ops.catalog import spec_of
from ..runtime.execute.executor import Executor, Run
from ..runtime.state.buckets import Bucket
from ..runtime.state.gradients import GradientStore
from ..runtime.transport.local import LocalTransport, LocalWorld
from ..runtime.transport.transport import Wait
from ..schedules.schedule import Action
from .footprint import Footprints, Output, storage
from .run import Footprint, MemoryPoint

META = torch.device("meta")


class Ledger:
    """Bytes of a rank that are alive: values on its device or its host, and ``gradients`` of parameters.

    ``most``: both at the moment when their sum was the largest.
    """

    def __init__(self) -> None:
        self.bytes = self.gradients = 0
        self.most = 0, 0

    def note(self, more: int = 0) -> None:
        """Note the bytes of now; ``more``: what a function has in addition."""
        now = self.bytes + more, self.gradients
        if sum(now) > sum(self.most):
            self.most = now

    def restart(self) -> None:
        """Take what is alive now as the most."""
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
    """A stand-in for a tensor."""

    memory: Allocation
    shape: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    contiguous: bool = True

    @property
    def dense(self) -> int:
        """Return its size without gaps, in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class RehearsedTransport(LocalTransport):
    """Transfers of stand-ins: each side counts its own memory.

    ``processes``: a received value has a buffer that is allocated when the receive is posted, as large as the value;
    else it is what was sent.
    """

    def __init__(self, world: LocalWorld, rank: int, ledger: Ledger, *, processes: bool) -> None:
        super().__init__(world, rank)
        self.ledger, self.processes = ledger, processes

    def send(self, x: Any, to: int, channel: int, label: str) -> Wait:
        if self.processes and not x.contiguous:
            x = Stand(Allocation(self.ledger, x.dense), x.shape, x.dtype)
        message: Any = Stand(Allocation(None, x.memory.bytes), x.shape, x.dtype, x.contiguous)
        super().send(message, to, channel, label)
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
            message = wait()
            return Stand(Allocation(self.ledger, message.memory.bytes), shape, dtype, message.contiguous)

        return arrive


class CountedGradients(GradientStore):
    """Gradients that are counted and not added.

    Its transport's ledger knows the memory that the runtime's own code gives gradients on the device: of sums, of what
    ranks add up in another dtype, and of what is no view of a sum.
    """

    transport: RehearsedTransport

    def begin(self, scale: float | Tensor | None = None) -> None:
        super().begin(scale)
        self.bucket_bytes = {id(bucket): _memory(bucket) for bucket in self.buckets}
        lasting = [*self.copies[0], *(bucket.total for bucket in self.buckets if bucket.total is not None)]
        lasting_bytes = sum(x.untyped_storage().nbytes() for x in lasting)
        self.transport.ledger.gradients = lasting_bytes + sum(self.bucket_bytes.values())

    def add(self, value: str, more: int, product: int) -> None:
        """Count a term that is added.

        ``more``: the bytes of its function then, see :meth:`Ledger.note`; ``product``: those of the term, if it is
        computed for this alone.
        """
        to, leaving = self.sums[value], self.leaving
        self._first(to)
        self._weigh(to.bucket, more + product)
        self._count(to.bucket)
        self._weigh(to.bucket, more)
        if leaving is not None and leaving is not self.leaving:
            self._weigh(leaving[0], more)

    def _weigh(self, bucket: Bucket, more: int) -> None:
        previous, now = self.bucket_bytes[id(bucket)], _memory(bucket)
        self.bucket_bytes[id(bucket)] = now
        self.transport.ledger.gradients += now - previous
        self.transport.ledger.note(more)


def _memory(bucket: Bucket) -> int:
    buffers = (bucket.buffer,) if bucket.moving is None else (bucket.buffer, bucket.moving)
    return sum({storage(x): x.untyped_storage().nbytes() for x in buffers}.values())


class Rehearsal(Executor):
    """One rank's actions on stand-ins; ``points``: memory after, and at most during, each action."""

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
        function = self.footprints.calls[stage.index, label]
        *parts, (last_part, _) = function.parts
        for (value, product), (most, now) in zip(function.adds, parts, strict=True):
            self.ledger.note(most)
            assert self.store is not None
            self.store.add(value, now, product)
        self.ledger.note(last_part)
        _, *arguments = args
        args.clear()
        fresh: dict[int, Allocation] = {}
        outputs = zip(stage.pieces[label].outputs, function.outputs, strict=True)
        results = [self._stand(name, output, arguments, fresh) for name, output in outputs]
        self.outside.note()
        return tuple(results)  # type: ignore[arg-type]

    def _stand(self, name: str, out: Output, arguments: Sequence[Any], fresh: dict[int, Allocation]) -> Stand:
        if out.argument >= 0:
            memory = arguments[out.argument].memory
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
        """Require nothing: no gradients are computed."""

    def _settled(self, position: int) -> Any:
        return None


def rehearse(program: DistributedProgram, *, processes: bool = True) -> tuple[Footprint, ...]:
    """Return the memory of the rank at each pipeline place; ranks that differ only along other axes need the same.

    ``processes``: each rank is a process of its own, with buffers for what it receives; else all are in one process.
    """
    footprints = Footprints(program, processes=processes)
    train = any(stage.gradients for stage in program.stages)
    world = LocalWorld(program.mesh, program.sites)
    ranks = [program.mesh.rank({"pp": place}) for place in range(program.mesh["pp"])]
    rank_memory: dict[int, Footprint] = {}

    def work(transport: LocalTransport) -> None:
        part = program.rank(transport.rank)
        own_transport = RehearsedTransport(world, part.rank, Ledger(), processes=processes)
        store = CountedGradients(program, part, own_transport, META) if train else None
        rehearsal = Rehearsal(program, part, own_transport, footprints, store)
        nothing = Stand(Allocation(None, 0))
        state: Any = dict.fromkeys(program.state, nothing)
        inputs: Any = [nothing] * len(program.inputs)
        rehearsal.step(state, inputs, Run(train=train, check_finite=False))
        rank_memory[part.rank] = _rank_memory(program, part, rehearsal, store, processes=processes)

    with torch.no_grad():
        world.run_ranks(dict.fromkeys(ranks, work))
    return tuple(rank_memory[rank] for rank in ranks)


def _rank_memory(
    program: DistributedProgram,
    part: RankProgram,
    rehearsal: Rehearsal,
    store: CountedGradients | None,
    *,
    processes: bool,
) -> Footprint:
    """Return the memory of a rank after its rehearsal."""
    point = MemoryPoint(0, 0, 0)
    points = []
    for action in part.actions:
        point = rehearsal.points.get(action, MemoryPoint(point.held, point.held, point.gradients))
        points.append(point)
    gradients = {bool(store and store.host): store.nbytes if store else 0}
    state = {host: _state_bytes(program, part, processes=processes, host=host) for host in (False, True)}
    host_kept, waiting, disk = state[True] + gradients.get(True, 0), rehearsal.outside.most[0], 0
    if program.disk is not None and waiting:  # through buffers of the host that stay
        host_kept, waiting, disk = host_kept + program.disk.staging_bytes, 0, waiting
    return Footprint(
        parameters=state[False],
        gradients=gradients.get(False, 0),
        points=tuple(points),
        peak_live=rehearsal.peak_live,
        host=waiting + host_kept,
        host_kept=host_kept,
        disk=disk,
    )


def _in_place(program: DistributedProgram) -> frozenset[str]:
    """Return the values that are gathered in the memory in which ranks store them."""
    in_place: set[str] = set()
    for node in program.source.graph.nodes:
        source = _gathered(node)
        if source is None:
            if memory_of(node).name in in_place:  # a view, without its padding
                in_place.add(node.name)
            continue
        state = leaf(source)
        if source.name in in_place or (state is not None and program.state[state.name].in_place):
            in_place.add(node.name)
    return frozenset(in_place)


def _gathered(node: fx.Node) -> Any:
    """Return the part that a node gathers, or None if it gathers no state, or several parts."""
    gather, number = origin(node)
    collective = spec_of(gather.target).collective
    if collective is None or not collective.of_state:
        return None
    parts: Any = gather.args[0]
    if not isinstance(parts, Sequence):
        return parts
    return parts[number] if gather is not node else None


def _state_bytes(program: DistributedProgram, part: RankProgram, *, processes: bool, host: bool) -> int:
    """Return the bytes of the rank's parts of the state of its stages, with the room in which they are gathered.

    ``host``: count those on the host, else those on the device.
    """
    stages = {stage.index for stage in part.stages}
    sizes = [axis.size for axis in program.axes]
    total = 0
    for spec in program.state.values():
        if stages & set(spec.stages) and spec.host is host:
            shape = spec.room(sizes) if processes else local_shape(spec.shape, spec.sharding, sizes)
            total += torch.Size(shape).numel() * spec.dtype.itemsize
    return total
