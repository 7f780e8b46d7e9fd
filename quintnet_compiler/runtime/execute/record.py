"""Record a step's timeline: when a rank ran which function or collective, and how long it waited."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...compat.torch_codegen import SHIPPED
from ..transport.transport import Pending, Transport, Wait
from .comm import Comm
from .executor import Executor
from .segments import Function

T = TypeVar("T")
KINDS = {"once": "once", "forward": "F", "backward": "B", "weight": "W"}  # kinds of spans by a function's label


@dataclass(frozen=True, slots=True)
class RecordedSpan:
    """A part of a rank's step. Times are seconds since the rank left the barrier before the step.

    Attributes:
        kind: F, B, I, W or ``once`` for functions; ``collective`` within a function; ``sum`` of gradients; ``meeting``
            for other collectives between functions; ``send`` and ``receive``.
        exposed: seconds of it in which the rank only waited.
        message: of a send or receive: the other rank, the channel, and the message's number on that channel, from 1.
    """

    start: float
    end: float
    kind: str
    name: str
    stage: int = -1
    microbatch: int = -1
    axis: str = ""
    exposed: float = 0.0
    message: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Recorded:
    """The timeline of one rank's step.

    Attributes:
        seconds: the step's duration.
        host: the name of the rank's host.
        zero: the start of the rank's clock, in seconds of its host's clock.
    """

    rank: int
    seconds: float
    spans: tuple[RecordedSpan, ...]
    host: str = ""
    zero: float = 0.0

    def to_json(self) -> str:
        """Return the timeline as JSON."""
        return json.dumps([self.rank, self.seconds, [asdict(span) for span in self.spans], self.host, self.zero])

    @classmethod
    def from_json(cls, text: str) -> Recorded:
        """Return the timeline that :meth:`to_json` wrote."""
        rank, seconds, entries, *clock = json.loads(text)
        spans = (
            RecordedSpan(**{**entry, "message": entry["message"] and tuple(entry["message"])}) for entry in entries
        )
        return cls(rank, seconds, tuple(spans), *clock)


class Clock:
    """Marks points in time on a device; on a GPU they are events of its stream, so that marking does not wait."""

    def __init__(self, device: torch.device) -> None:
        """Start the clock."""
        self.device = device
        if device.type != "cpu":
            torch.accelerator.synchronize()  # the stream's clock then starts together with the host's
        self.host_zero, self.zero = time.perf_counter(), self.mark()

    def mark(self) -> Any:
        """Return a mark of the present."""
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(device=self.device, enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: Any) -> float:
        """Return the seconds from the clock's start to a mark; a GPU must be synchronized first."""
        return float(mark - self.zero if self.device.type == "cpu" else self.zero.elapsed_time(mark) / 1e3)


@dataclass
class Recorder:
    """Records the timeline of one step of this process's rank.

    Attributes:
        recorded: the timeline, after the step.
        marks: start, end, start and end of waiting, and the other fields of a span.
    """

    recorded: Recorded | None = None
    marks: list[tuple[Any, Any, Any, Any, dict[str, Any]]] = field(default_factory=list)

    def step(self, executor: Executor, run: Callable[[], T]) -> T:
        """Return ``run()``, a step of ``executor``, and set ``recorded``."""
        self.marks = []
        if len(everyone := tuple(range(executor.program.mesh.size))) > 1:
            executor.transport.start_sum(SHIPPED.zeros(1, device=executor.device), everyone, "barrier")()
        self.clock = Clock(executor.device)
        with self._installed(executor):
            result = run()
        end = self.clock.mark()
        if executor.device.type != "cpu":
            torch.accelerator.synchronize()
        clock = socket.gethostname(), self.clock.host_zero
        self.recorded = Recorded(executor.part.rank, self.clock.seconds(end), tuple(self._spans()), *clock)
        return result

    def timed(self, call: Callable[[], T], **span: Any) -> T:
        """Return ``call()``, and record a span during which the rank does nothing else."""
        start = self.clock.mark()
        result = call()
        end = self.clock.mark()
        self.marks.append((start, end, start, end, span))
        return result

    def begun(self, begin: Callable[[], Callable[[], T]], **span: Any) -> Callable[[], T]:
        """Return what waits for the operation that ``begin`` starts; only the wait is exposed time."""
        start = self.clock.mark()
        pending = begin()

        def wait() -> T:
            waiting = self.clock.mark()
            result = pending()
            end = self.clock.mark()
            self.marks.append((start, end, waiting, end, span))
            return result

        return wait

    @contextmanager
    def _installed(self, executor: Executor) -> Iterator[None]:
        """Let the executor run timed functions over a timed transport while the context is open."""
        transport, comm, functions = executor.transport, executor.comm, executor.functions
        program, store = executor.program, executor.gradients
        timed = TimedTransport(transport, self, executor)
        executor.transport = timed
        executor.comm = timed.comm = Comm(timed, program.mesh, executor.part.coordinate, store)
        executor.functions = {key: timed.function(call, *key) for key, call in functions.items()}
        if store is not None:
            store.transport = timed
        try:
            executor.comm.seed, executor.comm.step, executor.comm.scale = comm.seed, comm.step, comm.scale
            yield
        finally:
            executor.transport, executor.comm, executor.functions = transport, comm, functions
            if store is not None:
                store.transport = transport

    def _spans(self) -> Iterator[RecordedSpan]:
        for start, end, waiting, waited, span in self.marks:
            exposed = self.clock.seconds(waited) - self.clock.seconds(waiting) if span.get("axis") else 0.0
            yield RecordedSpan(self.clock.seconds(start), self.clock.seconds(end), exposed=exposed, **span)


class TimedTransport:
    """A transport that calls ``inner``, and records each call."""

    def __init__(self, inner: Transport, recorder: Recorder, executor: Executor) -> None:
        """Wrap the transport of an executor."""
        self.inner, self.recorder, self.rank = inner, recorder, inner.rank
        self.mesh, self.sites = executor.program.mesh, executor.program.sites
        self.buckets = {bucket.label for bucket in executor.gradients.buckets} if executor.gradients else set()
        self.stages = executor.stages
        self.comm: Comm | None = None
        self.stage = -1  # of the function that runs at present
        self.num_messages: Counter[tuple[str, int, int]] = Counter()  # by direction, other rank and channel

    def function(self, call: Function, stage: int, label: str) -> Function:
        """Return ``call`` with a recorded span; ``label`` is its name among the stage's functions."""
        kind = "I" if label == "backward" and self.stages[stage].weight is not None else KINDS[label]

        def run(args: list[Any]) -> Sequence[Any]:
            microbatch = -1 if label == "once" or self.comm is None else self.comm.microbatch
            self.stage = stage
            try:
                name = f"{stage}{kind}{microbatch}" if microbatch >= 0 else ""
                return self.recorder.timed(lambda: call(args), kind=kind, name=name, stage=stage, microbatch=microbatch)
            finally:
                self.stage = -1

        return run

    def _what(self, axis: str, at: int) -> dict[str, Any]:
        kind = "collective" if self.stage >= 0 else "meeting"
        return {"kind": kind, "name": self.sites[at], "stage": self.stage, "axis": axis}

    def _of(self, collective: str, args: tuple[Any, ...]) -> dict[str, Any]:
        return self._what(args[3] if collective == "exchange_rows" else args[1], args[-1])

    def _over(self, ranks: tuple[int, ...], label: str) -> dict[str, Any]:
        kind = "sum" if label in self.buckets else "meeting"
        coordinates = [self.mesh.coordinate(rank) for rank in ranks]
        axes = [axis for axis in self.mesh.names if len({coordinate[axis] for coordinate in coordinates}) > 1]
        everyone = kind == "meeting" and len(ranks) == self.mesh.size
        return {"kind": kind, "name": label, "axis": "all" if everyone else "+".join(axes)}

    # -- collectives

    def run(self, collective: str, *args: Any) -> Any:
        return self.recorder.timed(lambda: self.inner.run(collective, *args), **self._of(collective, args))

    def start(self, collective: str, *args: Any) -> Pending:
        return self.recorder.begun(lambda: self.inner.start(collective, *args), **self._of(collective, args))

    def begin_gather(
        self, xs: Sequence[Tensor], axis: str, dims: Sequence[int], parts: Sequence[int], at: int
    ) -> tuple[tuple[Tensor, ...], Callable[[], Any]]:
        gathered: tuple[Tensor, ...] = ()

        def begin() -> Callable[[], Any]:
            nonlocal gathered
            gathered, wait = self.inner.begin_gather(xs, axis, dims, parts, at)
            return wait

        wait = self.recorder.begun(begin, **self._what(axis, at))
        return gathered, wait

    def permute(self, x: Tensor, axis: str, sources: tuple[int, ...], at: int) -> Wait:
        return self.recorder.begun(lambda: self.inner.permute(x, axis, sources, at), **self._what(axis, at))

    def kernels(self, axis: str, device: torch.device, create: Callable[[ProcessGroup, torch.device], T]) -> T | None:
        return self.inner.kernels(axis, device, create)

    def start_sum(self, x: Tensor, ranks: tuple[int, ...], label: str) -> Wait:
        return self.recorder.begun(lambda: self.inner.start_sum(x, ranks, label), **self._over(ranks, label))

    def start_scatter(self, x: Tensor, ranks: tuple[int, ...], label: str) -> Wait:
        return self.recorder.begun(lambda: self.inner.start_scatter(x, ranks, label), **self._over(ranks, label))

    def broadcast(self, x: Tensor, ranks: tuple[int, ...], source: int, label: str) -> Tensor:
        return self.recorder.timed(lambda: self.inner.broadcast(x, ranks, source, label), **self._over(ranks, label))

    # -- between stages

    def send(self, x: Tensor, to: int, channel: int, label: str) -> Wait:
        span = {"kind": "send", "name": label, "axis": "pp", "message": self._next("to", to, channel)}
        return self.recorder.begun(lambda: self.inner.send(x, to, channel, label), **span)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int, channel: int, label: str) -> Wait:
        span = {"kind": "receive", "name": label, "axis": "pp", "message": self._next("from", source, channel)}
        return self.recorder.begun(lambda: self.inner.receive(shape, dtype, source, channel, label), **span)

    def _next(self, way: str, other: int, channel: int) -> tuple[int, int, int]:
        self.num_messages[way, other, channel] += 1
        return other, channel, self.num_messages[way, other, channel]
