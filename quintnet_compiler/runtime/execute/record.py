"""A step with a clock beside it: when a rank ran what, and what it waited for."""

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

from ..transport.symmetric import Kernels
from ..transport.transport import Pending, Transport, Wait
from .comm import Comm
from .executor import Executor
from .segments import Function

T = TypeVar("T")
KINDS = {"once": "once", "forward": "F", "backward": "B", "weight": "W"}  # of actions, by the function's label


@dataclass(frozen=True, slots=True)
class RecordedSpan:
    """Seconds by the rank's clock, which starts when it leaves the barrier before the step.

    ``kind``: F, B, I, W, ``once``; ``collective`` (within a function), ``sum`` (of gradients), ``meeting`` (what else
    ranks add up or hand round), ``send`` (begins) and ``receive`` (is waited for), whose ``message`` is the other rank,
    the channel, and the how manieth there. ``exposed``: the seconds of it in which the rank did nothing else.
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
    """What one rank has to tell: its spans, and when its step was over. ``zero``: its clock's start, by its host's."""

    rank: int
    seconds: float
    spans: tuple[RecordedSpan, ...]
    host: str = ""
    zero: float = 0.0

    def to_json(self) -> str:
        return json.dumps([self.rank, self.seconds, [asdict(span) for span in self.spans], self.host, self.zero])

    @classmethod
    def from_json(cls, text: str) -> Recorded:
        rank, seconds, spans, *place = json.loads(text)
        made = (RecordedSpan(**{**one, "message": one["message"] and tuple(one["message"])}) for one in spans)
        return cls(rank, seconds, tuple(made), *place)


class Clock:
    """Marks of what a device has done; on a GPU they are events of its stream, so that nothing waits for them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type != "cpu":
            torch.accelerator.synchronize()  # so that the stream's zero is the host's
        self.host_zero, self.zero = time.perf_counter(), self.mark()

    def mark(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(device=self.device, enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: Any) -> float:
        """From zero to a mark; on a GPU, only when it is synchronised."""
        return float(mark - self.zero if self.device.type == "cpu" else self.zero.elapsed_time(mark) / 1e3)


@dataclass
class Recorder:
    """Takes the time of one step of this process's rank; ``found`` then has it."""

    found: Recorded | None = None
    marks: list[tuple[Any, Any, Any, Any, dict[str, Any]]] = field(default_factory=list)

    def step(self, executor: Executor, run: Callable[[], T]) -> T:
        """``run()``, a step of ``executor``."""
        self.marks = []
        if len(everyone := tuple(range(executor.program.mesh.size))) > 1:
            executor.transport.start_sum(torch.zeros(1, device=executor.device), everyone, "barrier")()
        self.clock = Clock(executor.device)
        with self._inside(executor):
            result = run()
        end = self.clock.mark()
        if executor.device.type != "cpu":
            torch.accelerator.synchronize()
        place = socket.gethostname(), self.clock.host_zero
        self.found = Recorded(executor.part.rank, self.clock.seconds(end), tuple(self._spans()), *place)
        return result

    def timed(self, call: Callable[[], T], **what: Any) -> T:
        """``call()``, all of whose time the rank spends on it."""
        start = self.clock.mark()
        result = call()
        end = self.clock.mark()
        self.marks.append((start, end, start, end, what))
        return result

    def begun(self, begin: Callable[[], Callable[[], T]], **what: Any) -> Callable[[], T]:
        """What ``begin`` begins: exposed is only that somebody waits for it."""
        start = self.clock.mark()
        pending = begin()

        def wait() -> T:
            waiting = self.clock.mark()
            result = pending()
            end = self.clock.mark()
            self.marks.append((start, end, waiting, end, what))
            return result

        return wait

    @contextmanager
    def _inside(self, executor: Executor) -> Iterator[None]:
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
        for start, end, waiting, waited, what in self.marks:
            exposed = self.clock.seconds(waited) - self.clock.seconds(waiting) if what.get("axis") else 0.0
            yield RecordedSpan(self.clock.seconds(start), self.clock.seconds(end), exposed=exposed, **what)


class TimedTransport:
    """Another transport, with a recorder that sees each call."""

    def __init__(self, inner: Transport, recorder: Recorder, executor: Executor) -> None:
        self.inner, self.recorder, self.rank = inner, recorder, inner.rank
        self.mesh, self.sites = executor.program.mesh, executor.program.sites
        self.buckets = {bucket.label for bucket in executor.gradients.buckets} if executor.gradients else set()
        self.stages = executor.stages
        self.comm: Comm | None = None
        self.stage = -1  # whose function runs
        self.message: Counter[tuple[str, int, int]] = Counter()

    def function(self, call: Function, stage: int, label: str) -> Function:
        """``call``, timed; ``label`` is its name among the stage's functions."""
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
        here = [self.mesh.coordinate(rank) for rank in ranks]
        axes = [axis for axis in self.mesh.names if len({place[axis] for place in here}) > 1]
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
        made: tuple[Tensor, ...] = ()

        def begin() -> Callable[[], Any]:
            nonlocal made
            made, wait = self.inner.begin_gather(xs, axis, dims, parts, at)
            return wait

        wait = self.recorder.begun(begin, **self._what(axis, at))
        return made, wait

    def permute(self, x: Tensor, axis: str, sources: tuple[int, ...], at: int) -> Wait:
        return self.recorder.begun(lambda: self.inner.permute(x, axis, sources, at), **self._what(axis, at))

    def kernels(self, axis: str, device: torch.device) -> Kernels | None:
        return self.inner.kernels(axis, device)

    def start_sum(self, x: Tensor, ranks: tuple[int, ...], label: str) -> Wait:
        return self.recorder.begun(lambda: self.inner.start_sum(x, ranks, label), **self._over(ranks, label))

    def start_scatter(self, x: Tensor, ranks: tuple[int, ...], label: str) -> Wait:
        return self.recorder.begun(lambda: self.inner.start_scatter(x, ranks, label), **self._over(ranks, label))

    def broadcast(self, x: Tensor, ranks: tuple[int, ...], source: int, label: str) -> Tensor:
        return self.recorder.timed(lambda: self.inner.broadcast(x, ranks, source, label), **self._over(ranks, label))

    # -- between stages

    def send(self, x: Tensor, to: int, channel: int, label: str) -> Wait:
        what = {"kind": "send", "name": label, "axis": "pp", "message": self._next("to", to, channel)}
        return self.recorder.begun(lambda: self.inner.send(x, to, channel, label), **what)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int, channel: int, label: str) -> Wait:
        what = {"kind": "receive", "name": label, "axis": "pp", "message": self._next("from", source, channel)}
        return self.recorder.begun(lambda: self.inner.receive(shape, dtype, source, channel, label), **what)

    def _next(self, way: str, other: int, channel: int) -> tuple[int, int, int]:
        self.message[way, other, channel] += 1
        return other, channel, self.message[way, other, channel]
