"""Points in a plane, as a picture with logarithmic axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.html import environment

LEFT, RIGHT, TOP, BOTTOM = 78, 540, 16, 250


@dataclass(frozen=True)
class Mark:
    """A point, and its label."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class LogAxis:
    """A logarithmic axis between two values, and its ends in the picture."""

    low: float
    high: float
    begin: float
    end: float

    @classmethod
    def spanning(cls, values: Sequence[float], begin: float, end: float) -> LogAxis:
        """Return an axis with a margin around ``values``."""
        return cls(min(values) / 1.15, max(values) * 1.15, begin, end)

    def position(self, value: float) -> float:
        """Return where a value is in the picture."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(self.begin + share * (self.end - self.begin), 1)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Return positions and texts of at least three ticks.

        These are as few of 1, 2, 5 times a power of ten as possible, or equal steps where values are close.
        """
        for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            values = [step * 10.0**power for power in powers for step in steps]
            inside = [value for value in values if self.low <= value <= self.high]
            if len(inside) >= 3:
                break
        else:
            most = (self.high - self.low) / 3
            power = 10.0 ** math.floor(math.log10(most))
            step = max(power * many for many in (1, 2, 5) if power * many <= most)
            inside = [step * n for n in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]
        return [(self.position(value), f"{value:,.10g}") for value in inside]


def points_svg(
    marks: Sequence[Mark], x: str, y: str, *, others: Sequence[Mark] = (), proportional: bool = False
) -> str:
    """Return a picture of a line through ``marks``, and of ``others`` without a line.

    ``proportional``: with another line through the first mark, in proportion to ``x``.
    """
    if not marks:
        return ""
    ideal = [marks[0].y * mark.x / marks[0].x for mark in marks] if proportional else []
    across = LogAxis.spanning([mark.x for mark in (*marks, *others)], LEFT, RIGHT)
    up = LogAxis.spanning([*(mark.y for mark in (*marks, *others)), *ideal], BOTTOM, TOP)
    places, beside = (
        [(across.position(mark.x), up.position(mark.y), mark.text) for mark in kind] for kind in (marks, others)
    )
    ends = [(places[at][0], up.position(ideal[at])) for at in (0, -1)] if proportional else []
    template = environment(__package__).get_template("points.svg.jinja")
    return template.render(
        points=places, others=beside, ideal=ends, across=across.ticks, up=up.ticks, x=x, y=y,
        left=LEFT, right=RIGHT, top=TOP, bottom=BOTTOM,
    )  # fmt: skip
