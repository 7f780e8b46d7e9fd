"""Best first: layouts in the order of what they cost at least, until none that is left can be among the best."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from ..errors import CompileError
from .estimate import Estimate
from .layouts import Layout

Objective = Literal["time", "memory", "cost"]


@dataclass(frozen=True)
class Rejected:
    """A layout that cannot be used, and why; with how many bytes it lacks, where that is the reason."""

    layout: Layout
    reason: str
    lacks: float = math.inf


@dataclass(frozen=True)
class Found:
    """``ranked``: feasible layouts, best first. ``rejected``: the others that were looked at. ``left``: how many were
    never looked at, because they cost at least ``bound`` (or because time ran out: then ``complete`` is False)."""

    ranked: tuple[Estimate, ...]
    rejected: tuple[Rejected, ...]
    left: int
    complete: bool


class Bounds(Protocol):
    """What a layout costs at least: cheap to ask, and never more than what it costs."""

    def seconds(self, layout: Layout) -> float:
        """Of a step."""
        ...

    def bytes(self, layout: Layout) -> float:
        """On the fullest rank."""
        ...


def search(
    layouts: Iterable[Layout],
    evaluate: Callable[[Layout], Estimate],
    bounds: Bounds,
    memory_bytes: float,
    *,
    top_k: int,
    objective: Objective,
    deadline: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Found:
    """Evaluate layouts until the best ``top_k`` are known, or ``deadline`` (of time.monotonic) has come."""
    value = {"time": lambda e: e.seconds, "memory": lambda e: float(e.memory_bytes), "cost": lambda e: e.seconds}[objective]
    rejected: list[Rejected] = []
    order: list[tuple[float, Layout]] = []
    for layout in layouts:
        least = bounds.bytes(layout)
        if least > memory_bytes:
            rejected.append(
                Rejected(
                    layout,
                    f"state alone takes at least {_gib(least)} of {_gib(memory_bytes)}",
                    least - memory_bytes,
                )
            )
            continue
        order.append((least if objective == "memory" else bounds.seconds(layout), layout))
    order.sort()
    ranked: list[Estimate] = []
    for position, (bound, layout) in enumerate(order):
        progress(position, len(order))
        if len(ranked) >= top_k and bound > value(ranked[top_k - 1]):
            return Found(tuple(ranked[:top_k]), tuple(rejected), len(order) - position, complete=True)
        if time.monotonic() > deadline:
            return Found(tuple(ranked[:top_k]), tuple(rejected), len(order) - position, complete=False)
        try:
            found = evaluate(layout)
        except CompileError as error:
            rejected.append(Rejected(layout, f"{error.code} {error.message}"))
            continue
        if found.memory_bytes > memory_bytes:
            lacks = found.memory_bytes - memory_bytes
            rejected.append(Rejected(layout, f"needs {_gib(found.memory_bytes)} of {_gib(memory_bytes)}", lacks))
            continue
        ranked.append(found)
        ranked.sort(key=lambda e: (value(e), e.seconds, e.layout))
    progress(len(order), len(order))
    return Found(tuple(ranked[:top_k]), tuple(rejected), 0, complete=True)


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
