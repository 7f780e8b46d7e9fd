"""The result of a simulation: what every rank does when, what it waits for, and what it holds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from ..core.annotations import format_bytes
from ..core.errors import CompileError
from ..core.files import path_of, save_text
from ..schedules.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Event:
    """Something that takes time on a rank, in seconds since the step began.

    ``kind``: F, B, I, W (compute actions), ``once``, ``collective`` (of a function), ``transfer`` (what the rank
    sends), ``sum`` (gradients over ranks) or ``meeting`` (all pipeline ranks). ``exposed``: the seconds of it in which
    the rank did nothing else.
    """

    start: float
    end: float
    kind: str
    name: str = ""
    stage: int = -1
    microbatch: int = -1
    axis: str = ""
    exposed: float = 0.0

    @property
    def seconds(self) -> float:
        """Return how long it takes."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Memory of a rank after an action.

    Attributes:
        held: bytes of values that the runtime keeps (for the backward, to be sent, as results).
        peak: bytes of values at the moment of the action in which they and gradients of parameters were the most.
        gradients: bytes of gradients of parameters at that moment.
    """

    seconds: float
    action: str
    held: int
    peak: int
    gradients: int


@dataclass(frozen=True)
class Peak:
    """The most memory that a rank needs: when, while doing what, and its parts at that moment in bytes."""

    rank: int
    seconds: float
    action: str
    bytes: int
    parameters: int
    gradients: int
    values: int

    def __str__(self) -> str:
        parts = {"parameters": self.parameters, "gradients": self.gradients, "values": self.values}
        shares = ", ".join(f"{name} {format_bytes(count)}" for name, count in parts.items())
        place = f"on rank {self.rank} at {duration(self.seconds)}, during {self.action}"
        return f"{format_bytes(self.bytes)} {place}: {shares}"


@dataclass(frozen=True, slots=True)
class HostUpdate:
    """An optimizer on the host (AdamW) after a step; its four phases follow each other.

    Attributes:
        gathering: seconds in which ranks exchange parts of parameters and gradients.
        out: seconds of copying these to the host.
        update: seconds of the processor.
        back: seconds of copying parameters to the device.
        device_bytes: peak on the device, in addition to parameters and gradients.
        host_bytes: peak on the host.
        kept_bytes: what of that stays between steps: parameters, and two numbers for each element.
    """

    gathering: float
    out: float
    update: float
    back: float
    device_bytes: int
    host_bytes: int
    kept_bytes: int

    @property
    def seconds(self) -> float:
        """Return the sum of the four phases."""
        return self.gathering + self.out + self.update + self.back

    def __str__(self) -> str:
        parts = {"gathering": self.gathering, "to host": self.out, "computing": self.update, "from host": self.back}
        shares = ", ".join(f"{name} {duration(seconds)}" for name, seconds in parts.items())
        return f"{duration(self.seconds)} after a step: {shares}; {format_bytes(self.host_bytes)} of the host"


@dataclass(frozen=True)
class RankTimeline:
    """A rank, which stands for ``count`` ranks that do the very same.

    Attributes:
        busy_seconds: seconds in which it computes or communicates within functions.
        bubble: share (0 to 1) of the step in which it is idle.
        exposed: seconds of waiting for communication, by axis.
        parameter_bytes: of its parameters, all step.
        gradient_bytes: of all gradients, which it has when a step ends.
        host_bytes: peak in memory of the host, with that of an optimizer there (``update``).
        disk_bytes: in files.
    """

    rank: int
    coordinate: Mapping[str, int]
    count: int
    events: tuple[Event, ...]
    busy_seconds: float
    bubble: float
    exposed: Mapping[str, float]
    peak_live: int = 0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    host_bytes: int = 0
    disk_bytes: int = 0
    update: HostUpdate | None = None
    memory: tuple[MemorySample, ...] = ()

    @property
    def name(self) -> str:
        """Return the rank, its coordinate and its count, as tables show it."""
        place = " ".join(f"{axis}{index}" for axis, index in self.coordinate.items())
        return f"rank {self.rank}" + (f" ({place})" if place else "") + (f" ×{self.count}" if self.count > 1 else "")

    @property
    def peak_held(self) -> int:
        """Return the most bytes that the runtime keeps after any action."""
        return max((point.held for point in self.memory), default=0)

    @property
    def peak(self) -> Peak:
        """Return the moment of the most memory."""
        nothing = MemorySample(0.0, "nothing", 0, 0, 0)
        largest = max(self.memory, key=lambda point: point.peak + point.gradients, default=nothing)
        parts = self.parameter_bytes, largest.gradients, largest.peak
        return Peak(self.rank, largest.seconds, largest.action, sum(parts), *parts)


@dataclass(frozen=True)
class Timeline:
    """A simulated or measured step; times are in seconds.

    ``rows`` has the ranks that differ from each other; each says how many ranks it represents. ``str()`` for people,
    ``to_json()`` for programs, ``chrome_trace()`` for Chrome's tracing page and Perfetto, ``svg()`` and ``html()`` as
    pictures; ``save()`` and ``load()`` for later.
    """

    title: str
    schedule: str
    microbatches: int
    ranks: int
    seconds: float
    rows: tuple[RankTimeline, ...]
    notes: tuple[str, ...] = ()

    def rank(self, rank: int) -> RankTimeline:
        """Return the row of a simulated rank.

        Raises:
            CompileError: QN201 if another rank represents this one.
        """
        for row in self.rows:
            if row.rank == rank:
                return row
        shown = ", ".join(str(row.rank) for row in self.rows[:20])
        raise CompileError("QN201", f"rank {rank} is like one of those shown", fix=f"ask for one of {shown}")

    def require_schedule(self, ranks: int, schedule: Schedule) -> None:
        """Require a step of this number of ranks and this schedule.

        Raises:
            CompileError: QN211 if it is another.
        """
        actual = self.ranks, self.schedule, self.microbatches
        expected = ranks, schedule.name, schedule.num_microbatches
        if actual != expected:
            ours, theirs = ("{} ranks, {}, {} microbatches".format(*numbers) for numbers in (actual, expected))
            raise CompileError(
                "QN211", f"the timeline is of {ours}, the program of {theirs}", fix="measure this program"
            )

    @property
    def bubble(self) -> float:
        """Return the share (0 to 1) of all ranks' time in which they neither compute nor wait for communication."""
        return sum(row.bubble * row.count for row in self.rows) / sum(row.count for row in self.rows)

    @property
    def exposed(self) -> Mapping[str, float]:
        """Return for each axis the seconds in which a rank waits for its communication: the mean over ranks."""
        total = sum(row.count for row in self.rows)
        axes = dict.fromkeys(axis for row in self.rows for axis in row.exposed)
        return {axis: sum(row.exposed.get(axis, 0.0) * row.count for row in self.rows) / total for axis in axes}

    @property
    def peak(self) -> Peak:
        """Return the most memory that any rank needs."""
        return max((row.peak for row in self.rows), key=lambda peak: peak.bytes)

    def to_json(self) -> str:
        """Return everything, in seconds and bytes."""
        rows = [{**asdict(row), "peak": asdict(row.peak)} for row in self.rows]
        head = {"title": self.title, "schedule": self.schedule, "microbatches": self.microbatches, "ranks": self.ranks}
        totals = {"seconds": self.seconds, "bubble": self.bubble, "exposed": dict(self.exposed)}
        return json.dumps({**head, **totals, "peak": asdict(self.peak), "notes": self.notes, "rows": rows}, indent=1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``to_json()``: at once, in place of what was there."""
        save_text(path_of(path, "QN211"), self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Timeline:
        """Read what :meth:`save` wrote.

        Raises:
            CompileError: QN211 if the file cannot be read, or is no timeline.
        """
        from .saved import read_timeline

        return read_timeline(path_of(path, "QN211"))

    def __str__(self) -> str:
        return "\n".join([*self._summary(), *self._table(), *(f"note: {note}" for note in self.notes)])

    @property
    def _has_memory(self) -> bool:
        return any(row.memory for row in self.rows)

    def _summary(self) -> Iterator[str]:
        """Yield the lines about all ranks."""
        shares = " ".join(f"{axis} {seconds / self.seconds:.1%}," for axis, seconds in self.exposed.items() if seconds)
        head = f"{self.title}, {self.ranks} ranks, {self.schedule}, {self.microbatches} microbatches"
        yield f"{head}: a step of {duration(self.seconds)}"
        yield f"bubble {self.bubble:.1%}; exposed communication: {shares.rstrip(',') or 'none'}"
        if self._has_memory:
            yield f"peak memory {self.peak}"
        if host_bytes := max(row.host_bytes for row in self.rows):
            yield f"memory of the host {format_bytes(host_bytes)} a rank"
        if disk_bytes := max(row.disk_bytes for row in self.rows):
            yield f"files {format_bytes(disk_bytes)} a rank"
        if updates := [row.update for row in self.rows if row.update is not None]:
            yield f"the optimizer on the host takes {max(updates, key=lambda update: update.seconds)}"

    def _table(self) -> Iterator[str]:
        """Yield a line for each rank shown, with a header."""
        names = [row.name for row in self.rows[:MAX_TABLE_ROWS]]
        width = max(map(len, names))
        memory = f" {'live':>5} {'kept':>10} {'peak':>10}" if self._has_memory else ""
        yield f"  {'':<{width}}  {'busy':>9} {'bubble':>7} {'exposed':>9}{memory}"
        for name, row in zip(names, self.rows, strict=False):
            if self._has_memory:
                memory = f" {row.peak_live:>5} {format_bytes(row.peak_held):>10} {format_bytes(row.peak.bytes):>10}"
            times = f"{duration(row.busy_seconds):>9} {row.bubble:>7.1%} {duration(sum(row.exposed.values())):>9}"
            yield f"  {name:<{width}}  {times}{memory}"
        if len(self.rows) > MAX_TABLE_ROWS:
            yield f"  and {len(self.rows) - MAX_TABLE_ROWS} more"

    def _repr_html_(self) -> str:
        from .chart import figure

        return figure(self)

    def svg(self) -> str:
        """Return a picture: a row per rank, its communication and its memory beneath."""
        from .chart import timeline_svg

        return timeline_svg(self)

    def html(self) -> str:
        """Return the picture as a page of its own, with the summary."""
        from .chart import timeline_page

        return timeline_page(self)

    def chrome_trace(self) -> str:
        """Return JSON for Perfetto or chrome://tracing: a process per rank, a thread for computing and each axis."""
        return json.dumps({"displayTimeUnit": "ms", "traceEvents": list(self._trace())})

    def _trace(self) -> Iterator[dict[str, object]]:
        for row in self.rows:
            threads = ["compute", *dict.fromkeys(event.axis for event in row.events if event.axis)]
            yield {"ph": "M", "name": "process_name", "pid": row.rank, "args": {"name": row.name}}
            for number, name in enumerate(threads):
                yield {"ph": "M", "name": "thread_name", "pid": row.rank, "tid": number, "args": {"name": name}}
            for event in row.events:
                yield {
                    "ph": "X",
                    "name": event_label(event),
                    "cat": event.kind,
                    "pid": row.rank,
                    "tid": threads.index(event.axis) if event.axis else 0,
                    "ts": event.start * 1e6,
                    "dur": event.seconds * 1e6,
                    "args": {"name": event.name, "stage": event.stage, "microbatch": event.microbatch},
                }
            for point in row.memory:
                held = {"values": point.held}
                yield {"ph": "C", "name": "memory", "pid": row.rank, "ts": point.seconds * 1e6, "args": held}


MAX_TABLE_ROWS = 32


def event_label(event: Event) -> str:
    """Return ``F3`` for a compute action, else the event's name."""
    return f"{event.kind}{event.microbatch}" if event.microbatch >= 0 and not event.axis else event.name or event.kind


def duration(seconds: float) -> str:
    """Format seconds for people.

    >>> duration(0.00123), duration(12.0), duration(0)
    ('1.23 ms', '12 s', '0 s')
    """
    if seconds == 0:
        return "0 s"
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= factor * 0.9995:
            return f"{seconds / factor:.3g} {unit}" if seconds < 1000 else f"{seconds:.0f} s"
    return f"{seconds / 1e-9:.3g} ns"
