"""Plans along a line: time against memory, against the number of devices, against one argument that is varied."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from ..core.html import table
from .estimate import Estimate, aligned, bytes_of, cells_of, time_of
from .points_picture import Mark, points_svg
from .workload import rounded


@dataclass(frozen=True)
class ParetoFront:
    """Plans of which none is beaten in both time and memory by another, the fastest first; each takes at least a fifth
    less memory than the one before, or as much less as any. ``memory_bytes``: of a device. ``proven``: whether every
    search was complete; else there may be better ones."""

    points: tuple[Estimate, ...]
    memory_bytes: float
    proven: bool

    def numbers(self) -> dict[str, Any]:
        """Everything, in seconds and bytes."""
        points = [one.numbers() for one in self.points]
        return {"memory_bytes": self.memory_bytes, "proven": self.proven, "front": points}

    def to_json(self) -> str:
        """:meth:`numbers` as JSON."""
        return json.dumps(self.numbers(), indent=2)

    def __str__(self) -> str:
        proven = "" if self.proven else "; not proven, as searches ended before"
        head = f"time against memory, of a device's {bytes_of(self.memory_bytes)}{proven}"
        return "\n".join([head, *aligned(cells_of(self.points))])

    def svg(self) -> str:
        """A picture: memory to the right, time upwards."""
        return front_svg(self.points)

    def _repr_html_(self) -> str:
        head, *rows = cells_of(self.points)
        return f"{self.svg()}{table(head, rows, 'Time against memory')}"


class _Point(Protocol):
    """The best layout of one of several searches, or why there is none."""

    @property
    def found(self) -> Estimate | None: ...

    @property
    def why(self) -> str: ...


P = TypeVar("P", bound=_Point)


def _numbers(points: Sequence[P], named: Callable[[P], dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**named(one), "plan": one.found.numbers() if one.found else None, "why_not": one.why} for one in points]


def _table(points: Sequence[P], head: Sequence[str], named: Callable[[P], Sequence[str]]) -> list[tuple[str, ...]]:
    """Rows of the points that have a layout, below names; none without such a point."""
    some = [one for one in points if one.found]
    if not some:
        return []
    first, *rows = cells_of([one.found for one in some if one.found])
    return [(*head, *first), *((*named(one), *row) for one, row in zip(some, rows, strict=True))]


def _speeds(points: Sequence[P], at: Callable[[P], float], said: Callable[[P], str]) -> tuple[list[Mark], str]:
    """Marks of how much is done a second, and of what."""
    some = [(one, one.found) for one in points if one.found]
    unit = some[0][1].figures.unit if some else "row"
    marks = [
        Mark(at(one), speed := e.figures.per_second, f"{said(one)}: {rounded(speed)}/s, {e.layout}") for one, e in some
    ]
    return marks, f"{unit}s a second"


@dataclass(frozen=True)
class ScalingPoint:
    """The best layout on so many devices, or why there is none."""

    devices: int
    found: Estimate | None
    why: str = ""


@dataclass(frozen=True)
class ScalingCurve:
    """The best plans of one global batch on different numbers of devices (strong scaling)."""

    device: str
    points: tuple[ScalingPoint, ...]

    @property
    def efficiency(self) -> dict[int, float]:
        """Speed of each number of devices over that of the fewest, for each device."""
        found = [(one.devices, one.found.seconds * one.devices) for one in self.points if one.found]
        return {devices: min(found)[1] / spent for devices, spent in found}

    def numbers(self) -> dict[str, Any]:
        """Everything, in seconds and bytes."""
        shares = self.efficiency
        points = _numbers(self.points, lambda one: {"devices": one.devices, "efficiency": shares.get(one.devices)})
        return {"device": self.device, "scaling": points}

    def to_json(self) -> str:
        """:meth:`numbers` as JSON."""
        return json.dumps(self.numbers(), indent=2)

    def _cells(self) -> list[tuple[str, ...]]:
        shares = self.efficiency
        return _table(
            self.points, ("devices", "efficiency"), lambda one: (str(one.devices), f"{shares[one.devices]:.0%}")
        )

    def __str__(self) -> str:
        lines = [f"the same batch on more or fewer {self.device}"]
        lines += aligned(self._cells())
        return "\n".join([*lines, *(f"{one.devices} devices: {one.why}" for one in self.points if not one.found)])

    def svg(self) -> str:
        """A picture: devices to the right, speed upwards, and what as many times the fewest would reach."""
        marks, unit = _speeds(self.points, lambda one: one.devices, lambda one: f"{one.devices} devices")
        return points_svg(marks, "devices", unit, proportional=True)

    def _repr_html_(self) -> str:
        if not self._cells():
            return table(["devices", "why not"], [(one.devices, one.why) for one in self.points])
        head, *rows = self._cells()
        return f"{self.svg()}{table(head, rows, f'One batch on {self.device}')}"


# What can be varied, and what its values are.
SWEPT: Mapping[str, str] = MappingProxyType(
    {
        "devices": "devices of the cluster",
        "network": "bytes a second of a node's network, one way",
        "rows": "rows of the global batch",
        "length": "positions of a row",
    }
)


@dataclass(frozen=True)
class SweepPoint:
    """The best layout for one ``value``, or why there is none."""

    value: float
    found: Estimate | None
    why: str = ""


@dataclass(frozen=True)
class Sweep:
    """The best plans for several values of ``argument`` (a key of ``SWEPT``). ``str()`` for people, ``to_json()`` for
    programs."""

    argument: str
    points: tuple[SweepPoint, ...]

    def numbers(self) -> dict[str, Any]:
        """Everything, in seconds and bytes."""
        return {"argument": self.argument, "sweep": _numbers(self.points, lambda one: {"value": one.value})}

    def to_json(self) -> str:
        """:meth:`numbers` as JSON."""
        return json.dumps(self.numbers(), indent=2)

    def _cells(self) -> list[tuple[str, ...]]:
        return _table(self.points, (self.argument,), lambda one: (f"{one.value:,g}",))

    def __str__(self) -> str:
        lines = [f"the best plan for each of several {SWEPT[self.argument]}", *aligned(self._cells())]
        return "\n".join([*lines, *(f"{self.argument} {one.value:,g}: {one.why}" for one in self.points if one.why)])

    def svg(self) -> str:
        """A picture: the argument to the right, speed upwards."""
        marks, unit = _speeds(self.points, lambda one: one.value, lambda one: f"{one.value:,g}")
        return points_svg(marks, SWEPT[self.argument], unit)

    def _repr_html_(self) -> str:
        if not self._cells():
            return table([self.argument, "why not"], [(one.value, one.why) for one in self.points])
        head, *rows = self._cells()
        return f"{self.svg()}{table(head, rows, f'The best plan for each of several {SWEPT[self.argument]}')}"


def undominated(found: Sequence[Estimate]) -> list[Estimate]:
    """Those that no other beats in both time and memory, the fastest first."""
    kept: list[Estimate] = []
    for one in sorted(found, key=lambda e: (e.seconds, e.memory_bytes)):
        if not kept or one.memory_bytes < kept[-1].memory_bytes:
            kept.append(one)
    return kept


def front_svg(front: Sequence[Estimate], others: Sequence[Estimate] = ()) -> str:
    """A picture: memory to the right, time upwards; a line through ``front``."""
    first, more = ([_mark(one) for one in kind] for kind in (front, others))
    return points_svg(first, "GiB on the fullest rank", "seconds of a step", others=more)


def _mark(one: Estimate) -> Mark:
    said = f"{time_of(one.seconds)}, {bytes_of(one.memory_bytes)}: {one.layout}"
    return Mark(one.memory_bytes / 2**30, one.seconds, said)
