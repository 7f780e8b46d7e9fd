"""Simulate a schedule with given durations: events, then what joins all ranks at the end of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ..core.mesh import Mesh
from ..schedules.schedule import Flow, Schedule, StageEdge
from .engine import Engine, SimulatedRank, SimulatedSpan
from .faults import Faults, Rows
from .timeline import Event, HostUpdate, MemorySample, RankTimeline, Timeline
from .work import Durations, GradientSum, WorkPart, last_releases


class MemoryPoint(NamedTuple):
    """Bytes of an action: see :class:`.timeline.MemorySample`."""

    held: int
    peak: int
    gradients: int


@dataclass(frozen=True)
class Footprint:
    """Memory of the rank at a pipeline place, in bytes.

    Attributes:
        parameters: of its parameters.
        gradients: of all of its gradients.
        points: memory of each of its actions, in order.
        peak_live: most microbatches whose saved values it has at once.
        host: peak of what it keeps in memory of the host.
        host_kept: what of that it keeps between steps.
        disk: what it keeps in files.
    """

    parameters: int
    gradients: int
    points: tuple[MemoryPoint, ...]
    peak_live: int
    host: int = 0
    host_kept: int = 0
    disk: int = 0


@dataclass(frozen=True)
class Setting:
    """The ranks that run a schedule, and what slows them down.

    Attributes:
        lockstep: axes along which ranks meet within every function.
        memory: of the rank at each pipeline place, in a step.
        updates: of an optimizer on the host of the rank at each pipeline place.
    """

    mesh: Mesh
    lockstep: tuple[str, ...] = ()
    faults: Faults = field(default_factory=Faults)
    title: str = ""
    memory: tuple[Footprint, ...] = ()
    updates: tuple[HostUpdate, ...] = ()
    notes: tuple[str, ...] = ()


def simulate_schedule(
    schedule: Schedule, edges: Iterable[StageEdge], durations: Durations, setting: Setting | None = None
) -> Timeline:
    """Return when each rank does what, for a schedule of :func:`..schedules.schedule.with_transfers`.

    Raises:
        ScheduleError: QN208 if some action can never start.
        CompileError: QN201 for faults of ranks that do not exist.
    """
    setting = Setting(Mesh(pp=schedule.num_ranks)) if setting is None else setting
    rows = Rows.to_simulate(setting.mesh, setting.lockstep, setting.faults)
    flow = Flow.from_edges(tuple(edges), schedule.num_stages)
    lines = Engine(schedule, flow, rows.rows, durations).run_actions()
    extra: list[list[Event]] = [[] for _ in lines]
    # where ranks share cores, all of them compete for these
    crowd = max(1.0, setting.mesh.size / durations.cores) if durations.cores else 1.0
    free = _gradient_sums(rows, lines, durations, crowd, extra)
    end = _meetings(rows, durations, crowd, free, extra)
    timelines = [_row(setting, line, more, end) for line, more in zip(lines, extra, strict=True)]
    return Timeline(
        setting.title or repr(setting.mesh),
        schedule.name,
        schedule.num_microbatches,
        setting.mesh.size,
        end,
        tuple(timelines),
        setting.notes,
    )


def _gradient_sums(
    rows: Rows,
    lines: Sequence[SimulatedRank],
    durations: Durations,
    crowd: float,
    extra: list[list[Event]],
) -> list[float]:
    """Add up gradients over ranks: each sum starts when all of its ranks have it, after the previous one."""
    free = [line.free for line in lines]
    sums = {line.row.place: durations.sums(line.row.place) for line in lines}
    computed = [line.free for line in lines]
    for place, gradient_sums in sums.items():
        members = [index for index, line in enumerate(lines) if line.row.place == place]
        channel = dict.fromkeys(members, 0.0)
        for term in gradient_sums:
            asked = {index: max(channel[index], _ready(lines[index], term, durations.overlaps)) for index in members}
            for index in members:
                group = [other for other in members if _meet(rows, lines[index], lines[other], term.axes)]
                slow = max(lines[other].row.links.get(axis, 1.0) for other in group for axis in term.axes)
                start = max(asked[other] for other in group)
                channel[index] = start + term.seconds * slow * crowd
                exposed = max(0.0, channel[index] - max(free[index], start, computed[index]))
                free[index] = max(free[index], channel[index])
                event = Event(start, channel[index], "sum", term.name, axis="+".join(term.axes), exposed=exposed)
                extra[index].append(event)
    return free


def _ready(line: SimulatedRank, term: GradientSum, overlaps: bool) -> float:
    """Return when a rank has all terms of a sum."""
    if not overlaps:
        return line.free
    last = last_releases(tuple(line.actions))
    return max(line.after[last[stage]] - seconds * line.row.compute for stage, seconds in term.ready.items())


def _meet(rows: Rows, line: SimulatedRank, other: SimulatedRank, axes: Sequence[str]) -> bool:
    """Return whether the pipelines of two ranks differ at most along ``axes``."""
    place, other_place = rows.columns[line.row.column], rows.columns[other.row.column]
    return all(place[name] == other_place[name] for name in place if name not in axes)


def _meetings(rows: Rows, durations: Durations, crowd: float, free: Sequence[float], extra: list[list[Event]]) -> float:
    clock = list(free)
    for meeting in durations.meetings():
        groups: dict[int, list[int]] = defaultdict(list)
        for index, row in enumerate(rows.rows):
            if meeting.everyone or row.place in meeting.places:
                groups[0 if meeting.everyone else row.column].append(index)
        for members in groups.values():
            start = max(clock[index] for index in members)
            seconds = meeting.seconds * crowd
            for index in members:
                clock[index] = start + seconds
                event = Event(start, clock[index], "meeting", meeting.name, axis=meeting.axis, exposed=seconds)
                extra[index].append(event)
    return max(clock, default=0.0)


def _row(setting: Setting, line: SimulatedRank, extra: Sequence[Event], end: float) -> RankTimeline:
    exposed: dict[str, float] = defaultdict(float)
    events: list[Event] = []
    busy = 0.0
    for span in line.spans:
        busy += span.end - span.start
        exposed["pp"] += span.waited
        events += _span_events(span)
    events += [Event(f.start, f.end, "transfer", str(f.send), f.send.stage, f.send.microbatch, "pp")
               for f in line.flights if f.end > f.start]  # fmt: skip
    events += extra
    for event in events:
        if event.axis:
            exposed[event.axis] += event.exposed
    outside = sum(event.exposed for event in extra) + sum(span.waited for span in line.spans)
    bubble = (end - busy - outside) / end if end else 0.0
    row = RankTimeline(
        line.row.rank,
        setting.mesh.coordinate(line.row.rank),
        line.row.count,
        tuple(sorted(events, key=lambda event: (event.start, event.end))),
        busy,
        bubble,
        {axis: seconds for axis, seconds in exposed.items() if seconds},
    )
    if not setting.memory:
        return row
    place = line.row.place
    row = _with_memory(row, line, setting.memory[place])
    return _with_update(row, setting.updates[place], setting.memory[place].host_kept) if setting.updates else row


def _span_events(span: SimulatedSpan) -> list[Event]:
    """Return the events of an action: itself, the collectives that it waits for, and those that it overlaps with."""
    if span.action is not None:
        place = span.action.stage, span.action.microbatch
        events = [Event(span.start, span.end, span.action.op.value, str(span.action), *place)]
    else:
        events = [Event(span.start, span.end, "once")] if span.end > span.start else []
    events += _collectives(span.start, span.action.stage if span.action else -1, span.work.waited)
    for hidden in span.work.hidden:
        start = span.start + hidden.offset
        events.append(Event(start, start + hidden.seconds, "collective", hidden.name, axis=hidden.axis))
    return events


def _with_update(row: RankTimeline, update: HostUpdate, host_kept: int) -> RankTimeline:
    """Add an update on the host; ``host_kept``: bytes of the host's memory that are in use between steps."""
    host_bytes = max(row.host_bytes + update.kept_bytes, host_kept + update.host_bytes)
    return replace(row, update=update, host_bytes=host_bytes)


def _collectives(start: float, stage: int, parts: Iterable[WorkPart]) -> list[Event]:
    events: list[Event] = []
    for part in parts:
        if part.axis and part.seconds:
            events.append(
                Event(start, start + part.seconds, "collective", part.name, stage, -1, part.axis, part.seconds)
            )
        start += part.seconds
    return events


def _with_memory(row: RankTimeline, line: SimulatedRank, memory: Footprint) -> RankTimeline:
    points = [
        MemorySample(seconds, str(action), *point)
        for seconds, action, point in zip(line.after, line.actions, memory.points, strict=True)
    ]
    return replace(
        row,
        peak_live=memory.peak_live,
        parameter_bytes=memory.parameters,
        gradient_bytes=memory.gradients,
        host_bytes=memory.host,
        disk_bytes=memory.disk,
        memory=tuple(points),
    )
