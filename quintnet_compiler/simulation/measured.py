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

MOST = 64  # ranks that are shown

Sent = Mapping[tuple[int, int, int, int], float]  # from, to, channel, how manieth: when


def shown_ranks(mesh: Mesh) -> frozenset[int]:
    """Whole pipelines, and at most as many ranks as are shown (but one pipeline)."""
    columns: dict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
    for rank in range(mesh.size):
        columns[tuple((axis, place) for axis, place in mesh.coordinate(rank).items() if axis != "pp")].append(rank)
    found: list[int] = []
    for column in columns.values():
        if not found or len(found) + len(column) <= MOST:
            found += column
    return frozenset(found)


def measured_timeline(program: DistributedProgram, texts: Sequence[str], device: torch.device) -> Timeline:
    """``texts``: of the ranks that are shown, what they recorded.

    A rank that waits for another stage is idle until that one sends, and waits for the transfer from then on.
    """
    ranks = _together([Recorded.from_json(text) for text in texts])
    end = max(one.seconds for one in ranks)
    sends = [(one.rank, span) for one in ranks for span in one.spans if span.kind == "send"]
    sent = {(rank, *span.message): span.start for rank, span in sends if span.message}
    notes = [f"measured on {device.type}"]
    if len({one.host for one in ranks}) > 1:
        notes.append("the clocks of machines start when the first rank of each leaves a barrier")
    if len(ranks) < program.mesh.size:
        notes.append(f"{len(ranks)} of {program.mesh.size} ranks are shown")
    return Timeline(
        repr(program.mesh),
        program.schedule.name,
        program.schedule.num_microbatches,
        program.mesh.size,
        end,
        tuple(_row(program.mesh, one, sent, end) for one in sorted(ranks, key=lambda one: one.rank)),
        tuple(notes),
    )


def _together(ranks: Sequence[Recorded]) -> list[Recorded]:
    """By one clock. Processes of a machine have the same; a rank may have left the barrier late, but never early."""
    zeros: dict[str, float] = {}
    for one in ranks:
        zeros[one.host] = min(one.zero, zeros.get(one.host, one.zero))
    return [_later(one, one.zero - zeros[one.host]) for one in ranks]


def _later(one: Recorded, seconds: float) -> Recorded:
    spans = tuple(replace(span, start=span.start + seconds, end=span.end + seconds) for span in one.spans)
    return replace(one, seconds=one.seconds + seconds, spans=spans)


def _row(mesh: Mesh, one: Recorded, sent: Sent, end: float) -> RankTimeline:
    events = tuple(sorted(_events(one, sent), key=lambda event: (event.start, event.end)))
    busy = sum(event.seconds for event in events if not event.axis)
    exposed: dict[str, float] = defaultdict(float)
    for event in events:
        if event.axis:
            exposed[event.axis] += event.exposed
    # collectives within functions are part of what is busy
    outside = sum(event.exposed for event in events if event.axis and event.kind != "collective")
    bubble = max(0.0, (end - busy - outside) / end) if end else 0.0
    waits = {axis: seconds for axis, seconds in exposed.items() if seconds}
    return RankTimeline(one.rank, mesh.coordinate(one.rank), 1, events, busy, bubble, waits)


def _events(one: Recorded, sent: Sent) -> Iterator[Event]:
    for span in one.spans:
        if span.kind == "send":
            yield _event(span, span.end - span.exposed, "transfer", span.exposed)
        elif span.kind == "receive":
            assert span.message is not None
            source, channel, number = span.message
            begun = sent.get((source, one.rank, channel, number), span.end)
            start = max(begun, span.end - span.exposed)
            if start < span.end:
                yield _event(span, start, "transfer", span.end - start)
        else:
            yield _event(span, span.start, span.kind, span.exposed)


def _event(span: RecordedSpan, start: float, kind: str, exposed: float) -> Event:
    return Event(start, span.end, kind, span.name, span.stage, span.microbatch, span.axis, exposed)
