"""Curves of plans: time against memory, against the number of devices, and against one argument."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from ..core.html import table
from .estimate import Estimate, aligned_columns, bytes_of, cells_of, time_of
from .points_picture import Mark, points_svg
from .workload import four_digits


@dataclass(frozen=True)
class ParetoFront:
    """Plans of which none is beaten in both time and memory by another, the fastest first.

    Each takes at least a fifth less memory than the previous one, or as much less as any plan.

    Attributes:
        points: the plans.
        memory_bytes: of a device.
        proven: whether every search was complete; otherwise there may be better plans.
    """

    points: tuple[Estimate, ...]
    memory_bytes: float
    proven: bool

    def numbers(self) -> dict[str, Any]:
        """Return all fields, in seconds and bytes."""
        points = [point.numbers() for point in self.points]
        return {"memory_bytes": self.memory_bytes, "proven": self.proven, "front": points}

    def to_json(self) -> str:
        """Return :meth:`numbers` as JSON."""
        return json.dumps(self.numbers(), indent=2)

    def __str__(self) -> str:
        proven = "" if self.proven else "; not proven, as searches ended before"
        head = f"time against memory, of a device's {bytes_of(self.memory_bytes)}{proven}"
        return "\n".join([head, *aligned_columns(cells_of(self.points))])

    def svg(self) -> str:
        """Return a picture: memory to the right, time upwards."""
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
    return [
        {**named(point), "plan": point.found.numbers() if point.found else None, "why_not": point.why}
        for point in points
    ]


def _table(points: Sequence[P], head: Sequence[str], named: Callable[[P], Sequence[str]]) -> list[tuple[str, ...]]:
    """Return rows of the points that have a layout, below a row of names; nothing without such a point."""
    found_points = [point for point in points if point.found]
    if not found_points:
        return []
    first, *rows = cells_of([point.found for point in found_points if point.found])
    return [(*head, *first), *((*named(point), *row) for point, row in zip(found_points, rows, strict=True))]


def _speeds(points: Sequence[P], at: Callable[[P], float], said: Callable[[P], str]) -> tuple[list[Mark], str]:
    """Return marks of the throughput of points, and the unit."""
    pairs = [(point, point.found) for point in points if point.found]
    unit = pairs[0][1].figures.unit if pairs else "row"
    marks = [
        Mark(at(point), speed := e.figures.per_second, f"{said(point)}: {four_digits(speed)}/s, {e.layout}")
        for point, e in pairs
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
        """Return the throughput of each device, relative to the fewest devices, by number of devices."""
        device_seconds = [(point.devices, point.found.seconds * point.devices) for point in self.points if point.found]
        return {devices: min(device_seconds)[1] / spent for devices, spent in device_seconds}

    def numbers(self) -> dict[str, Any]:
        """Return all fields, in seconds and bytes."""
        shares = self.efficiency
        points = _numbers(
            self.points, lambda point: {"devices": point.devices, "efficiency": shares.get(point.devices)}
        )
        return {"device": self.device, "scaling": points}

    def to_json(self) -> str:
        """Return :meth:`numbers` as JSON."""
        return json.dumps(self.numbers(), indent=2)

    def _cells(self) -> list[tuple[str, ...]]:
        shares = self.efficiency
        return _table(
            self.points, ("devices", "efficiency"), lambda point: (str(point.devices), f"{shares[point.devices]:.0%}")
        )

    def __str__(self) -> str:
        lines = [f"the same batch on more or fewer {self.device}"]
        lines += aligned_columns(self._cells())
        return "\n".join(
            [*lines, *(f"{point.devices} devices: {point.why}" for point in self.points if not point.found)]
        )

    def svg(self) -> str:
        """Return a picture: devices to the right, throughput upwards, and a line of perfect scaling."""
        marks, unit = _speeds(self.points, lambda point: point.devices, lambda point: f"{point.devices} devices")
        return points_svg(marks, "devices", unit, proportional=True)

    def _repr_html_(self) -> str:
        if not self._cells():
            return table(["devices", "why not"], [(point.devices, point.why) for point in self.points])
        head, *rows = self._cells()
        return f"{self.svg()}{table(head, rows, f'One batch on {self.device}')}"


# Arguments that can be varied, and the meaning of their values.
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
    """The best plans for several values of ``argument`` (a key of ``SWEPT``).

    ``str()`` for people, ``to_json()`` for programs.
    """

    argument: str
    points: tuple[SweepPoint, ...]

    def numbers(self) -> dict[str, Any]:
        """Return all fields, in seconds and bytes."""
        return {"argument": self.argument, "sweep": _numbers(self.points, lambda point: {"value": point.value})}

    def to_json(self) -> str:
        """Return :meth:`numbers` as JSON."""
        return json.dumps(self.numbers(), indent=2)

    def _cells(self) -> list[tuple[str, ...]]:
        return _table(self.points, (self.argument,), lambda point: (f"{point.value:,g}",))

    def __str__(self) -> str:
        lines = [f"the best plan for each of several {SWEPT[self.argument]}", *aligned_columns(self._cells())]
        return "\n".join(
            [*lines, *(f"{self.argument} {point.value:,g}: {point.why}" for point in self.points if point.why)]
        )

    def svg(self) -> str:
        """Return a picture: the argument to the right, throughput upwards."""
        marks, unit = _speeds(self.points, lambda point: point.value, lambda point: f"{point.value:,g}")
        return points_svg(marks, SWEPT[self.argument], unit)

    def _repr_html_(self) -> str:
        if not self._cells():
            return table([self.argument, "why not"], [(point.value, point.why) for point in self.points])
        head, *rows = self._cells()
        return f"{self.svg()}{table(head, rows, f'The best plan for each of several {SWEPT[self.argument]}')}"


def undominated(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Return the estimates that no other beats in both time and memory, the fastest first."""
    front: list[Estimate] = []
    for estimate in sorted(estimates, key=lambda e: (e.seconds, e.memory_bytes)):
        if not front or estimate.memory_bytes < front[-1].memory_bytes:
            front.append(estimate)
    return front


def front_svg(front: Sequence[Estimate], others: Sequence[Estimate] = ()) -> str:
    """Return a picture: memory to the right, time upwards; a line through ``front``."""
    first, more = ([_mark(estimate) for estimate in kind] for kind in (front, others))
    return points_svg(first, "GiB on the fullest rank", "seconds of a step", others=more)


def _mark(estimate: Estimate) -> Mark:
    said = f"{time_of(estimate.seconds)}, {bytes_of(estimate.memory_bytes)}: {estimate.layout}"
    return Mark(estimate.memory_bytes / 2**30, estimate.seconds, said)
