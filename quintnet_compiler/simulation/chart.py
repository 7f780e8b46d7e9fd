"""Timelines as pictures: the values of a template, in pixels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from markupsafe import Markup

from ..core import html
from ..core.annotations import format_bytes
from ..core.axes import AXES
from ..core.html import environment
from .timeline import Event, RankTimeline, Timeline, duration, event_label

WIDTH, MARGIN, LEFT, RIGHT = 1320, 24, 168, 24
TOP, BOX, THIN, CURVE, GAP = 104, 30, 9, 30, 18
MAX_PICTURE_ROWS = 24  # more are cut off, and counted
MAX_NOTEBOOK_CHARACTERS = 400_000
LEGEND = {
    "F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights", "once": "once a step",
    "collective": "collective", "transfer": "transfer between stages", "sum": "sum of gradients",
    "meeting": "all stages, or all ranks",
}  # fmt: skip
# of lanes; those of several axes ("dp+tp") come before the last
_ORDER = {**{axis: lane for lane, axis in enumerate(reversed(AXES))}, "all": len(AXES) + 1}
IN_BOX = frozenset({"F", "B", "I", "W", "once"})


@dataclass(frozen=True)
class Scale:
    """Seconds to pixels."""

    seconds: float
    left: float = LEFT
    width: float = WIDTH - LEFT - RIGHT

    def x(self, seconds: float) -> float:
        """Return the pixel of a time."""
        share = seconds / self.seconds if self.seconds else 0.0
        return round(self.left + share * self.width, 2)

    def ticks(self) -> list[dict[str, Any]]:
        """Return round numbers, at most ten."""
        if not self.seconds:
            return []
        step = round_step(self.seconds / 10)
        count = int(self.seconds / step + 1e-9)
        return [{"x": self.x(step * i), "text": duration(float(f"{step * i:.6g}"))} for i in range(count + 1)]


def round_step(rough: float) -> float:
    """Return the smallest of 1, 2, 5 times a power of ten that is not below ``rough``.

    >>> round_step(0.3), round_step(70)
    (0.5, 100.0)
    """
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)


@dataclass
class _Layout:
    """Rows from top to bottom; ``most_bytes``: the largest memory of them."""

    timeline: Timeline
    scale: Scale
    most_bytes: int
    y: float = TOP
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, row: RankTimeline) -> None:
        """Add the row of a rank."""
        axes = sorted(
            {event.axis for event in row.events if event.axis}, key=lambda axis: (_ORDER.get(axis, len(AXES)), axis)
        )
        drawn: dict[str, Any] = {
            "y": self.y,
            "name": f"rank {row.rank}" + (f"  ×{row.count}" if row.count > 1 else ""),
            "place": " ".join(f"{axis}={index}" for axis, index in row.coordinate.items()),
            "bubble": f"bubble {row.bubble:.1%}",
            "boxes": [self._box(event) for event in _visible(row.events, self.scale)],
            "lanes": [],
        }
        y = self.y + BOX + 4
        for axis in axes:
            events = [self._thin(event) for event in _merged(row.events, axis, self.scale)]
            drawn["lanes"].append({"axis": axis, "y": y, "events": events})
            y += THIN + 2
        if row.memory:
            drawn |= self._memory(row, y + 3)
            y += CURVE + 6
        self.rows.append(drawn)
        self.y = max(y, self.y + 46) + GAP

    def _box(self, event: Event) -> dict[str, Any]:
        x, width = self.scale.x(event.start), self.scale.x(event.end) - self.scale.x(event.start)
        text = str(event.microbatch) if event.microbatch >= 0 else ""
        font = min(11.0, 1.55 * width / max(1, len(text)))
        return {
            "kind": event.kind,
            "x": x,
            "width": round(max(width, 0.4), 2),
            "rx": 3 if width > 8 else 0,
            "odd": bool(event.stage // self.num_places % 2),
            "text": text if font >= 6.5 else "",
            "size": round(font, 1),
            "middle": round(x + width / 2, 2),
            "hover": _hover(event),
        }

    @property
    def num_places(self) -> int:
        """Return the number of pipeline places."""
        return max(1, len({row.coordinate.get("pp", 0) for row in self.timeline.rows}))

    def _thin(self, event: Event) -> dict[str, Any]:
        x, end = self.scale.x(event.start), self.scale.x(event.end)
        return {
            "kind": event.kind,
            "x": x,
            "width": round(max(end - x, 0.6), 2),
            "rx": 2 if end - x > 5 else 0,
            "hover": _hover(event),
        }

    def _memory(self, row: RankTimeline, y: float) -> dict[str, Any]:
        """Return a staircase of the bytes held, with the peaks within actions on top."""
        base = y + CURVE
        points = [(self.scale.left, base)]
        most_bytes = max(1, self.most_bytes)

        def height(count: int) -> float:
            return round(base - CURVE * count / most_bytes, 2)

        held = 0
        for sample in row.memory:
            x = self.scale.x(sample.seconds)
            points += [(x, height(held)), (x, height(sample.held))]
            held = sample.held
        end = self.scale.x(self.timeline.seconds)
        points += [(end, height(held)), (end, base)]
        peak = row.peak
        x = self.scale.x(peak.seconds)
        left_of = x > self.scale.left + self.scale.width - 90
        return {
            "memory_y": y + CURVE / 2 - 8,
            "curve": "M" + "L".join(f"{a:.2f} {b:.2f}" for a, b in points) + "Z",
            "peak_x": x,
            "peak_y": height(peak.values),
            "peak_text_x": x - 6 if left_of else x + 6,
            "anchor": "end" if left_of else "start",
            "peak": f"{format_bytes(peak.values)}",
            "memory_hover": f"values: at most {format_bytes(row.peak_held)} kept, "
            f"{format_bytes(peak.values)} during {peak.action}\n"
            f"parameters {format_bytes(row.parameter_bytes)}, gradients {format_bytes(peak.gradients)} then, "
            f"{format_bytes(row.gradient_bytes)} in all",
        }


def _merged(events: tuple[Event, ...], axis: str, scale: Scale) -> list[Event]:
    """Return the events of an axis; those that would be closer than a third of a pixel become one."""
    merged: list[Event] = []
    near = scale.seconds / scale.width / 3
    for event in events:
        if event.axis != axis:
            continue
        last = merged[-1] if merged else None
        if last and last.kind == event.kind and event.start - last.end < near and event.seconds < 3 * near:
            names = last.name if last.name.endswith("...") else f"{last.name} ..."
            merged[-1] = Event(last.start, max(last.end, event.end), last.kind, names, -1, -1, axis)
        else:
            merged.append(event)
    return merged


def _visible(events: tuple[Event, ...], scale: Scale) -> Iterator[Event]:
    """Yield the events of boxes, without those that end within a third of a pixel of the previous one."""
    near, end = scale.seconds / scale.width / 3, -math.inf
    for event in events:
        if event.kind in IN_BOX and event.end - end >= near:
            end = event.end
            yield event


def _hover(event: Event) -> str:
    name = f"{event.kind} {event.name}" if event.axis else event_label(event)
    stage = f", stage {event.stage}, microbatch {event.microbatch}" if event.microbatch >= 0 else ""
    axis = f" over {event.axis}" if event.axis else ""
    return f"{name}{axis}{stage}\n{duration(event.seconds)}, from {duration(event.start)} to {duration(event.end)}"


def timeline_svg(
    timeline: Timeline, theme: str = "", seconds: float | None = None, most: int = MAX_PICTURE_ROWS
) -> str:
    """Return the picture, ``seconds`` wide (by default as long as the step), of at most ``most`` rows.

    ``theme="auto"`` follows the viewer's dark mode.
    """
    shown = timeline.rows[:most]
    scale = Scale(timeline.seconds if seconds is None else seconds)
    layout = _Layout(timeline, scale, max((held.peak for row in shown for held in row.memory), default=0))
    for row in shown:
        layout.add(row)
    kinds = {event.kind for row in shown for event in row.events}
    legend, x = [], float(MARGIN)
    for kind, text in LEGEND.items():
        if kind in kinds:
            legend.append({"kind": kind, "text": text, "x": round(x, 1)})
            x += 34 + 6.1 * len(text)
    cut_off = len(timeline.rows) - len(shown)
    bottom = layout.y - GAP + 4
    picture = environment(__package__).get_template("timeline.svg.jinja")
    return picture.render(
        width=WIDTH, height=round(bottom + (34 if cut_off else 16)), margin=MARGIN, left=LEFT, span=scale.width,
        title=timeline.title, subtitle=_subtitle(timeline), legend=legend, legend_y=64, ticks=scale.ticks(),
        top=TOP, bottom=bottom, rows=layout.rows, box=BOX, thin=THIN, theme=theme,
        hidden=f"and {cut_off} more ranks" if cut_off else "",
    )  # fmt: skip


def _subtitle(timeline: Timeline) -> str:
    waits = [
        f"{axis} {seconds / timeline.seconds:.1%}" for axis, seconds in timeline.exposed.items() if timeline.seconds
    ]
    exposed = f", exposed communication {', '.join(waits)}" if waits else ""
    plural = "" if timeline.ranks == 1 else "s"
    return (
        f"{timeline.schedule}, {timeline.microbatches} microbatches, {timeline.ranks} rank{plural}: "
        f"a step of {duration(timeline.seconds)}, bubble {timeline.bubble:.1%}{exposed}"
    )


def figure_svg(timeline: Timeline) -> str:
    """Return :func:`timeline_svg` with as many rows as leave a notebook small: at least one."""
    rows = min(MAX_PICTURE_ROWS, len(timeline.rows))
    while len(picture := timeline_svg(timeline, "auto", most=rows)) > MAX_NOTEBOOK_CHARACTERS and rows > 1:
        rows = min(rows - 1, max(1, rows * MAX_NOTEBOOK_CHARACTERS // len(picture)))
    return picture


def figure(timeline: Timeline) -> str:
    """Return the picture for notebooks."""
    return f'<div style="overflow-x:auto">{figure_svg(timeline)}</div>'


def timeline_page(timeline: Timeline) -> str:
    """Return a page that needs nothing else."""
    waits = sum(timeline.exposed.values())
    cards = [
        ("a step", duration(timeline.seconds)),
        ("bubble", f"{timeline.bubble:.1%}"),
        ("exposed communication", f"{waits / timeline.seconds:.1%}" if timeline.seconds else "0%"),
        ("peak memory of a rank", format_bytes(timeline.peak.bytes)),
        ("ranks", str(timeline.ranks)),
    ]
    table = []
    for row in timeline.rows:
        waited = ", ".join(f"{axis} {duration(seconds)}" for axis, seconds in row.exposed.items()) or "none"
        peak = row.peak
        cells = [row.name, duration(row.busy_seconds), f"{row.bubble:.1%}", waited, str(row.peak_live)]
        table.append([*cells, format_bytes(row.peak_held), format_bytes(peak.bytes), peak.action])
    picture = Markup(timeline_svg(timeline, "auto"))  # the template of the picture has escaped it
    return html.page(
        "quintnet_compiler.simulation", "timeline.html.jinja", title=timeline.title, cards_shown=cards,
        picture=picture, table=table, notes=timeline.notes,
    )  # fmt: skip
