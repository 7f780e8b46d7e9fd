"""Numbers over steps as a picture for a page, in the page's colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..core.html import environment
from ..simulation.chart import round_step

WIDTH, HEIGHT = 440, 220
LEFT, RIGHT, TOP, BOTTOM = 58, 424, 44, 190
COLOURS = ("dp", "pp", "cp", "ep", "tp")  # of lines: classes of the page
MAX_BAD_MARKS = 200  # of a line


class Span(NamedTuple):
    """A curve from step ``first`` to ``last``: its mean, its least and its largest value.

    ``bad``: how many values were not finite; if none was, the mean is not either.
    """

    first: int
    last: int
    low: float
    high: float
    mean: float
    bad: int = 0

    @property
    def finite(self) -> bool:
        """Return whether any value was finite."""
        return math.isfinite(self.mean)

    @property
    def middle(self) -> float:
        """Return the step in the middle."""
        return (self.first + self.last) / 2


@dataclass(frozen=True)
class Line:
    """A curve with a name."""

    name: str
    spans: Sequence[Span]


@dataclass(frozen=True)
class StepAxis:
    """A linear axis from ``low`` to ``high``, and the pixels of these (``begin``, ``end``)."""

    low: float
    high: float
    begin: float
    end: float
    ticks: tuple[float, ...] = field(default=())

    @classmethod
    def of_values(cls, low: float, high: float) -> StepAxis:
        """Return a vertical axis with round numbers around the values: two at least, seven at most."""
        if high - low <= 1e-9 * max(abs(low), abs(high), 1e-300):  # all the same
            room = abs(low) * 0.1 or 1.0
            low, high = low - room, high + room
        step = round_step((high - low) / 4)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        numbers = tuple(step * number for number in range(first, last + 1))
        return cls(numbers[0], numbers[-1], BOTTOM, TOP, numbers)

    @classmethod
    def of_steps(cls, first: int, last: int) -> StepAxis:
        """Return a horizontal axis with whole numbers: two at least, seven at most."""
        if first == last:
            first, last = max(0, first - 1), last + 1
        step = max(1, round(round_step((last - first) / 6)))
        while (numbers := range(-(-first // step) * step, last + 1, step)) and len(numbers) < 2 and step > 1:
            step = max(1, round(round_step(step / 3)))
        return cls(first, last, LEFT, RIGHT, tuple(map(float, numbers)))

    def pixel(self, value: float) -> float:
        """Return the pixel of a value."""
        return round(self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin), 1)


def line_chart(title: str, lines: Sequence[Line], marks: Sequence[tuple[int, str]] = ()) -> str:
    """Return an SVG; empty if no line has a finite value.

    A band around a line is from its least to its largest values where it stands for several. ``marks``: steps at which
    something happened, and what.
    """
    spans = [span for line in lines for span in line.spans]
    finite = [span for span in spans if span.finite]
    if not finite:
        return ""
    across = StepAxis.of_steps(min(s.first for s in spans), max(s.last for s in spans))
    up = StepAxis.of_values(min(s.low for s in finite), max(s.high for s in finite))
    inside = [(across.pixel(step), text) for step, text in marks if across.low <= step <= across.high][-50:]
    return environment("quintnet_compiler.reports").get_template("lines.svg.jinja").render(
        width=WIDTH, height=HEIGHT, left=LEFT, right=RIGHT, top=TOP, bottom=BOTTOM, title=title,
        lines=[_drawn(line, COLOURS[index % len(COLOURS)], across, up) for index, line in enumerate(lines)],
        across=[(across.pixel(x), short(x)) for x in across.ticks], up=[(up.pixel(y), short(y)) for y in up.ticks],
        marks=inside, newest=_newest(lines[0]), bad=sum(span.bad for span in spans),
    )  # fmt: skip


def _newest(line: Line) -> str:
    """Return the last finite value of a line; "" if there is none."""
    finite = [span for span in line.spans if span.finite]
    return short(finite[-1].mean) if finite else ""


def _drawn(line: Line, colour: str, across: StepAxis, up: StepAxis) -> dict[str, Any]:
    """Return what the template shows of a line."""
    bad = [across.pixel(span.middle) for span in line.spans if span.bad]
    return {
        "name": line.name, "colour": colour, "points": _path(line, across, up), "band": _band(line, across, up),
        "dots": _alone(line, across, up), "bad": bad[:MAX_BAD_MARKS],
    }  # fmt: skip


def _pieces(line: Line) -> list[list[Span]]:
    """Return the runs of spans between values that are not finite."""
    runs: list[list[Span]] = [[]]
    for span in line.spans:
        if span.finite:
            runs[-1].append(span)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _path(line: Line, across: StepAxis, up: StepAxis) -> str:
    runs = ([f"{across.pixel(s.middle)} {up.pixel(s.mean)}" for s in run] for run in _pieces(line) if len(run) > 1)
    return "".join(f"M{'L'.join(run)}" for run in runs)


def _band(line: Line, across: StepAxis, up: StepAxis) -> str:
    band = ""
    for run in _pieces(line):
        if len(run) > 1 and any(s.high > s.low for s in run):
            upper = [f"{across.pixel(s.middle)} {up.pixel(s.high)}" for s in run]
            lower = [f"{across.pixel(s.middle)} {up.pixel(s.low)}" for s in reversed(run)]
            band += f"M{'L'.join([*upper, *lower])}Z"
    return band


def _alone(line: Line, across: StepAxis, up: StepAxis) -> list[tuple[float, float]]:
    """Return the places of values with no neighbour, which have no line."""
    return [(across.pixel(run[0].middle), up.pixel(run[0].mean)) for run in _pieces(line) if len(run) == 1]


def short(x: float) -> str:
    """Format a number in at most seven characters or so.

    >>> short(1500), short(250_000), short(0.0003), short(2.25), short(-0.0)
    ('1,500', '250k', '0.0003', '2.25', '0')
    """
    if x == 0:
        return "0"
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(x) >= max(factor, 1e4):
            return f"{x / factor:.4g}{unit}"
    return f"{x:,.4g}" if abs(x) < 1e3 else f"{x:,.0f}"
