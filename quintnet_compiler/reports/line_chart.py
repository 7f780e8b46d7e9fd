"""Numbers over steps as a picture for a page, whose colours it has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..core.html import environment
from ..simulation.chart import round_step

WIDTH, HEIGHT = 440, 220
LEFT, RIGHT, TOP, BOTTOM = 58, 424, 44, 190
COLOURS = ("dp", "pp", "cp", "ep", "tp")  # of lines, as the page has them


class Span(NamedTuple):
    """What a curve was from step ``first`` to ``last``: its mean, its least and its largest value. ``bad``: how many
    values were not finite; with no other, the mean is not either."""

    first: int
    last: int
    low: float
    high: float
    mean: float
    bad: int = 0

    @property
    def finite(self) -> bool:
        return math.isfinite(self.mean)

    @property
    def middle(self) -> float:
        return (self.first + self.last) / 2


@dataclass(frozen=True)
class Line:
    """A curve with a name."""

    name: str
    spans: Sequence[Span]


@dataclass(frozen=True)
class StepAxis:
    """A linear axis from ``low`` to ``high``, and where these are in the picture."""

    low: float
    high: float
    begin: float
    end: float
    ticks: tuple[float, ...] = field(default=())

    @classmethod
    def of_values(cls, low: float, high: float) -> StepAxis:
        """Upwards, to round numbers around the values: two at least, seven at most."""
        if high - low <= 1e-9 * max(abs(low), abs(high), 1e-300):  # all the same
            room = abs(low) * 0.1 or 1.0
            low, high = low - room, high + room
        step = round_step((high - low) / 4)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        numbers = tuple(step * number for number in range(first, last + 1))
        return cls(numbers[0], numbers[-1], BOTTOM, TOP, numbers)

    @classmethod
    def of_steps(cls, first: int, last: int) -> StepAxis:
        """To the right, with whole numbers: two at least, seven at most."""
        if first == last:
            first, last = max(0, first - 1), last + 1
        step = max(1, round(round_step((last - first) / 6)))
        while (numbers := range(-(-first // step) * step, last + 1, step)) and len(numbers) < 2 and step > 1:
            step = max(1, round(round_step(step / 3)))
        return cls(first, last, LEFT, RIGHT, tuple(map(float, numbers)))

    def place(self, value: float) -> float:
        return round(self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin), 1)


def line_chart(title: str, lines: Sequence[Line], marks: Sequence[tuple[int, str]] = ()) -> str:
    """An SVG. A band around a line is from its least to its largest values where it stands for several. ``marks``:
    steps at which something happened, and what. Empty if no line has a finite value."""
    spans = [span for line in lines for span in line.spans]
    finite = [span for span in spans if span.finite]
    if not finite:
        return ""
    across = StepAxis.of_steps(min(s.first for s in spans), max(s.last for s in spans))
    up = StepAxis.of_values(min(s.low for s in finite), max(s.high for s in finite))
    bad = sum(span.bad for span in spans)
    drawn = [
        {
            "name": line.name, "colour": COLOURS[at % len(COLOURS)], "points": _path(line, across, up),
            "band": _band(line, across, up), "dots": _alone(line, across, up),
            "bad": [across.place(span.middle) for span in line.spans if span.bad][:200],
        }
        for at, line in enumerate(lines)
    ]  # fmt: skip
    newest = next((span for span in reversed(lines[0].spans) if span.finite), None)
    inside = [(across.place(step), text) for step, text in marks if across.low <= step <= across.high][-50:]
    return environment("quintnet_compiler.reports").get_template("lines.svg.jinja").render(
        width=WIDTH, height=HEIGHT, left=LEFT, right=RIGHT, top=TOP, bottom=BOTTOM, title=title, lines=drawn,
        across=[(across.place(x), short(x)) for x in across.ticks], up=[(up.place(y), short(y)) for y in up.ticks],
        marks=inside, newest=short(newest.mean) if newest is not None else "", bad=bad,
    )  # fmt: skip


def _pieces(line: Line) -> list[list[Span]]:
    """Runs of spans between values that are not finite."""
    found: list[list[Span]] = [[]]
    for span in line.spans:
        if span.finite:
            found[-1].append(span)
        elif found[-1]:
            found.append([])
    return [run for run in found if run]


def _path(line: Line, across: StepAxis, up: StepAxis) -> str:
    runs = ([f"{across.place(s.middle)} {up.place(s.mean)}" for s in run] for run in _pieces(line) if len(run) > 1)
    return "".join(f"M{'L'.join(run)}" for run in runs)


def _band(line: Line, across: StepAxis, up: StepAxis) -> str:
    found = ""
    for run in _pieces(line):
        if len(run) > 1 and any(s.high > s.low for s in run):
            there = [f"{across.place(s.middle)} {up.place(s.high)}" for s in run]
            back = [f"{across.place(s.middle)} {up.place(s.low)}" for s in reversed(run)]
            found += f"M{'L'.join([*there, *back])}Z"
    return found


def _alone(line: Line, across: StepAxis, up: StepAxis) -> list[tuple[float, float]]:
    """Values with no neighbour, of which there is no line."""
    return [(across.place(run[0].middle), up.place(run[0].mean)) for run in _pieces(line) if len(run) == 1]


def short(x: float) -> str:
    """A number in at most seven characters or so.

    >>> short(1500), short(250_000), short(0.0003), short(2.25), short(-0.0)
    ('1,500', '250k', '0.0003', '2.25', '0')
    """
    if x == 0:
        return "0"
    for factor, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(x) >= max(factor, 1e4):
            return f"{x / factor:.4g}{unit}"
    return f"{x:,.4g}" if abs(x) < 1e3 else f"{x:,.0f}"
