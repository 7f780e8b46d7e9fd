"""Best first: layouts in the order of what they cost at least, until none that is left can be among the best."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from ..errors import CompileError
from .estimate import gib

Objective = Literal["time", "memory", "cost"]


class Priced(Protocol):
    """A layout (anything that can be ordered and printed) with what it costs."""

    @property
    def layout(self) -> Any: ...

    @property
    def seconds(self) -> float: ...

    @property
    def memory_bytes(self) -> float: ...


L = TypeVar("L")
L_contra = TypeVar("L_contra", contravariant=True)
E = TypeVar("E", bound=Priced)


@dataclass(frozen=True)
class Rejected(Generic[L]):
    """A layout that cannot be used, and why; with how many bytes it lacks, where that is the reason."""

    layout: L
    reason: str
    lacks: float = math.inf


@dataclass(frozen=True)
class Found(Generic[L, E]):
    """``ranked``: feasible layouts, best first. ``rejected``: the others that were looked at. ``left``: how many were
    never looked at, because they cost at least ``bound`` (or because time ran out: then ``complete`` is False)."""

    ranked: tuple[E, ...]
    rejected: tuple[Rejected[L], ...]
    left: int
    complete: bool


class Bounds(Protocol[L_contra]):
    """What a layout costs at least: never more than what it costs."""

    def seconds(self, layout: L_contra, /) -> float:
        """Of a step; cheap to ask."""
        ...

    def closer(self, layout: L_contra, /) -> float:
        """The same, nearer to the truth, and dearer to ask; 0 where nothing more is known."""
        ...

    def bytes(self, layout: L_contra, /) -> float:
        """On the fullest rank; cheap to ask."""
        ...

    def closer_bytes(self, layout: L_contra, /) -> float:
        """The same, nearer to the truth, and dearer to ask."""
        ...


@dataclass(frozen=True)
class Wanted:
    """How many plans, by what, from how much memory, until when (of time.monotonic). ``devices``: how many a layout
    uses, where its cost counts."""

    top_k: int
    objective: Objective
    memory_bytes: float
    deadline: float
    devices: Callable[[Any], int] = lambda layout: 1

    def value(self, found: Priced) -> float:
        if self.objective == "memory":
            return float(found.memory_bytes)
        return self.weighed(found.layout, found.seconds)

    def weighed(self, layout: Any, seconds: float) -> float:
        return seconds * self.devices(layout) if self.objective == "cost" else seconds


def search(
    layouts: Iterable[L],
    evaluate: Callable[[L], E],
    bounds: Bounds[L],
    wanted: Wanted,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Found[L, E]:
    """Evaluate layouts until the best are known, or time is over.

    A layout that is taken up gets its closer bound first, and waits again with that.
    """
    rejected: list[Rejected[L]] = []
    waiting: list[tuple[float, bool, L]] = []
    for layout in layouts:
        if short := _lack(layout, bounds.bytes(layout), wanted):
            rejected.append(short)
        else:
            least = (
                bounds.bytes(layout) if wanted.objective == "memory" else wanted.weighed(layout, bounds.seconds(layout))
            )
            waiting.append((least, False, layout))
    heapq.heapify(waiting)
    total, ranked = len(waiting), list[E]()
    while waiting:
        progress(total - len(waiting), total)
        bound, near, layout = heapq.heappop(waiting)
        enough = len(ranked) >= wanted.top_k and bound > wanted.value(ranked[wanted.top_k - 1])
        if enough or time.monotonic() > wanted.deadline:
            return Found(tuple(ranked[: wanted.top_k]), tuple(rejected), len(waiting) + 1, complete=enough)
        try:
            if not near:
                if short := _lack(layout, bounds.closer_bytes(layout), wanted):
                    rejected.append(short)
                    continue
                closer = (
                    bounds.closer_bytes(layout)
                    if wanted.objective == "memory"
                    else wanted.weighed(layout, bounds.closer(layout))
                )
                heapq.heappush(waiting, (max(bound, closer), True, layout))
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


def _lack(layout: L, least: float, wanted: Wanted) -> Rejected[L] | None:
    if least <= wanted.memory_bytes:
        return None
    reason = f"takes at least {gib(least)} of {gib(wanted.memory_bytes)}"
    return Rejected(layout, reason, least - wanted.memory_bytes)
