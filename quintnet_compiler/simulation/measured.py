"""A timeline of what ranks recorded while they ran a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from ..core.mesh import Mesh
from ..ir.distributed_program import DistributedProgram
from ..runtime.execute.record import Recorded, RecordedSpan
from .timeline import Event, RankTimeline, Timeline

MAX_RANKS = 64  # that are shown

SendTimes = Mapping[tuple[int, int, int, int], float]  # by source, target, channel and number


def shown_ranks(mesh: Mesh) -> frozenset[int]:
    """Return the ranks to show: whole pipelines, at least one, of at most ``MAX_RANKS`` ranks together."""
    columns: dict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
    for rank in range(mesh.size):
        columns[tuple((axis, place) for axis, place in mesh.coordinate(rank).items() if axis != "pp")].append(rank)
    ranks: list[int] = []
    for column in columns.values():
        if not ranks or len(ranks) + len(column) <= MAX_RANKS:
            ranks += column
    return frozenset(ranks)


def measured_timeline(program: DistributedProgram, texts: Sequence[str], device: torch.device) -> Timeline:
    """Return the timeline of what the ranks to show recorded (``texts``).

    A rank that waits for another stage is idle until that one sends, and waits for the transfer from then on.
    """
    ranks = _align_clocks([Recorded.from_json(text) for text in texts])
    end = max(record.seconds for record in ranks)
    sends = [(record.rank, span) for record in ranks for span in record.spans if span.kind == "send"]
    sent = {(rank, *span.message): span.start for rank, span in sends if span.message}
    notes = [f"measured on {device.type}"]
    if len({record.host for record in ranks}) > 1:
        notes.append("the clocks of machines start when the first rank of each leaves a barrier")
    if len(ranks) < program.mesh.size:
        notes.append(f"{len(ranks)} of {program.mesh.size} ranks are shown")
    return Timeline(
        repr(program.mesh),
        program.schedule.name,
        program.schedule.num_microbatches,
        program.mesh.size,
        end,
        tuple(_row(program.mesh, record, sent, end) for record in sorted(ranks, key=lambda record: record.rank)),
        tuple(notes),
    )


def _align_clocks(ranks: Sequence[Recorded]) -> list[Recorded]:
    """Return the records by one clock.

    Processes of a machine have the same clock; a rank may have left the barrier late, but never early.
    """
    zeros: dict[str, float] = {}
    for record in ranks:
        zeros[record.host] = min(record.zero, zeros.get(record.host, record.zero))
    return [_shift(record, record.zero - zeros[record.host]) for record in ranks]


def _shift(record: Recorded, seconds: float) -> Recorded:
    spans = tuple(replace(span, start=span.start + seconds, end=span.end + seconds) for span in record.spans)
    return replace(record, seconds=record.seconds + seconds, spans=spans)


def _row(mesh: Mesh, record: Recorded, sent: SendTimes, end: float) -> RankTimeline:
    events = tuple(sorted(_events(record, sent), key=lambda event: (event.start, event.end)))
    busy = sum(event.seconds for event in events if not event.axis)
    exposed: dict[str, float] = defaultdict(float)
    for event in events:
        if event.axis:
            exposed[event.axis] += event.exposed
    # collectives within functions are part of what is busy
    outside = sum(event.exposed for event in events if event.axis and event.kind != "collective")
    bubble = max(0.0, (end - busy - outside) / end) if end else 0.0
    waits = {axis: seconds for axis, seconds in exposed.items() if seconds}
    return RankTimeline(record.rank, mesh.coordinate(record.rank), 1, events, busy, bubble, waits)


def _events(record: Recorded, sent: SendTimes) -> Iterator[Event]:
    for span in record.spans:
        if span.kind == "send":
            yield _event(span, span.end - span.exposed, "transfer", span.exposed)
        elif span.kind == "receive":
            assert span.message is not None
            source, channel, number = span.message
            begun = sent.get((source, record.rank, channel, number), span.end)
            start = max(begun, span.end - span.exposed)
            if start < span.end:
                yield _event(span, start, "transfer", span.end - start)
        else:
            yield _event(span, span.start, span.kind, span.exposed)


def _event(span: RecordedSpan, start: float, kind: str, exposed: float) -> Event:
    return Event(start, span.end, kind, span.name, span.stage, span.microbatch, span.axis, exposed)
