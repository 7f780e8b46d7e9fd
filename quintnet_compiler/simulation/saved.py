"""Timelines from files, which may come from anywhere: what is not a timeline is refused."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from ..core.errors import CompileError
from ..core.names import one_line
from .timeline import Event, HostUpdate, MemorySample, RankTimeline, Timeline


class _Row(BaseModel):
    """A rank; ``peak`` follows from the rest."""

    model_config = ConfigDict(extra="forbid", strict=True)

    rank: int
    coordinate: dict[str, int]
    count: int
    events: list[Event]
    busy_seconds: float
    bubble: float
    exposed: dict[str, float]
    peak_live: int
    parameter_bytes: int
    gradient_bytes: int
    host_bytes: int = 0
    disk_bytes: int = 0
    update: HostUpdate | None = None
    memory: list[MemorySample]
    peak: Any


class _TimelineDocument(BaseModel):
    """A timeline; ``bubble``, ``exposed`` and ``peak`` follow from the rest."""

    model_config = ConfigDict(extra="forbid", strict=True)

    title: str
    schedule: str
    microbatches: int
    ranks: int
    seconds: float
    bubble: Any
    exposed: Any
    peak: Any
    notes: list[str]
    rows: list[_Row]


def read_timeline(path: Path) -> Timeline:
    """Return the timeline of a file.

    Raises:
        CompileError: QN211, see :meth:`Timeline.load`.
    """
    try:
        return _checked(_TimelineDocument.model_validate_json(path.read_text(encoding="utf-8")))
    except (ValidationError, ValueError, OSError) as error:
        reason = one_line(" ".join(str(error).splitlines()[:3]))
        fix = "save one with Timeline.save or quintnet measure"
        raise CompileError("QN211", f"{path} is no timeline: {reason}", fix=fix) from error


def _checked(document: _TimelineDocument) -> Timeline:
    rows = tuple(_row(row) for row in document.rows)
    times = [document.seconds, *(t for row in rows for event in row.events for t in (event.start, event.end))]
    times += [point.seconds for row in rows for point in row.memory]
    if (
        not rows
        or document.seconds <= 0
        or not all(math.isfinite(t) and 0 <= t <= 1.001 * document.seconds for t in times)
    ):
        raise ValueError("its times do not lie within a step")
    head = document.title, document.schedule, document.microbatches, document.ranks
    return Timeline(*head, document.seconds, rows, tuple(document.notes))


def _row(row: _Row) -> RankTimeline:
    fields: Mapping[str, Any] = {name: getattr(row, name) for name in _Row.model_fields if name != "peak"}
    return RankTimeline(**{**fields, "events": tuple(row.events), "memory": tuple(row.memory)})
