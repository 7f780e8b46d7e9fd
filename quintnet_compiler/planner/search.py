"""Best first: layouts in the order of what they cost at least, until none that is left can be among the best."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from ..errors import CompileError
from .estimate import Estimate, gib
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
    """What a layout costs at least: never more than what it costs."""

    def seconds(self, layout: Layout) -> float:
        """Of a step; cheap to ask."""
        ...

    def closer(self, layout: Layout) -> float:
        """The same, nearer to the truth, and dearer to ask; 0 where nothing more is known."""
        ...

    def bytes(self, layout: Layout) -> float:
        """On the fullest rank."""
        ...


@dataclass(frozen=True)
class Wanted:
    """How many plans, by what, from how much memory, until when (of time.monotonic)."""

    top_k: int
    objective: Objective
    memory_bytes: float
    deadline: float

    def value(self, found: Estimate) -> float:
        return float(found.memory_bytes) if self.objective == "memory" else found.seconds


def search(
    layouts: Iterable[Layout],
    evaluate: Callable[[Layout], Estimate],
    bounds: Bounds,
    wanted: Wanted,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Found:
    """Evaluate layouts until the best are known, or time is over.

    A layout that is taken up gets its closer bound first, and waits again with that.
    """
    rejected: list[Rejected] = []
    waiting: list[tuple[float, bool, Layout]] = []
    for layout in layouts:
        least = bounds.bytes(layout)
        if least > wanted.memory_bytes:
            reason = f"state alone takes at least {gib(least)} of {gib(wanted.memory_bytes)}"
            rejected.append(Rejected(layout, reason, least - wanted.memory_bytes))
        else:
            waiting.append((least if wanted.objective == "memory" else bounds.seconds(layout), False, layout))
    heapq.heapify(waiting)
    total, ranked = len(waiting), list[Estimate]()
    while waiting:
        progress(total - len(waiting), total)
        bound, near, layout = heapq.heappop(waiting)
        enough = len(ranked) >= wanted.top_k and bound > wanted.value(ranked[wanted.top_k - 1])
        if enough or time.monotonic() > wanted.deadline:
            return Found(tuple(ranked[: wanted.top_k]), tuple(rejected), len(waiting) + 1, complete=enough)
        try:
            if not near and wanted.objective != "memory":
                heapq.heappush(waiting, (max(bound, bounds.closer(layout)), True, layout))
                continue
            found = evaluate(layout)
        except CompileError as error:
            rejected.append(Rejected(layout, f"{error.code} {error.message}"))
            continue
        lacks = found.memory_bytes - wanted.memory_bytes
        if lacks > 0:
            reason = f"needs {gib(found.memory_bytes)} of {gib(wanted.memory_bytes)}"
            rejected.append(Rejected(layout, reason, lacks))
            continue
        ranked.append(found)
        ranked.sort(key=lambda e: (wanted.value(e), e.seconds, e.layout))
    progress(total, total)
    return Found(tuple(ranked[: wanted.top_k]), tuple(rejected), 0, complete=True)
