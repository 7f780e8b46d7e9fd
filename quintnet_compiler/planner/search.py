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

    A layout that is taken up gets its closer bound first, and waits again with that. Until something fits, every
    other one is the fastest of those that leave room, and each that does not fit asks for more of it.
    """
    rejected: list[Rejected[L]] = []
    waiting: list[tuple[float, bool, L]] = []
    sizes: dict[L, float] = {}
    for layout in layouts:
        size = bounds.bytes(layout)
        if short := _lack(layout, size, wanted):
            rejected.append(short)
            continue
        least = size if wanted.objective == "memory" else wanted.weighed(layout, bounds.seconds(layout))
        waiting.append((least, False, layout))
        sizes[layout] = size
    heapq.heapify(waiting)
    total, ranked, settled = len(waiting), list[E](), set[L]()
    room, turn = 0.5, False

    def settle(layout: L) -> bool:
        """Whether it fits."""
        settled.add(layout)
        try:
            found = evaluate(layout)
        except CompileError as error:
            rejected.append(Rejected(layout, f"{error.code} {error.message}"))
            return False
        lacks = found.memory_bytes - wanted.memory_bytes
        if lacks > 0:
            reason = f"needs {gib(found.memory_bytes)} of {gib(wanted.memory_bytes)}"
            rejected.append(Rejected(layout, reason, lacks))
            return False
        ranked.append(found)
        ranked.sort(key=lambda e: (wanted.value(e), e.seconds, e.layout))
        return True

    while waiting:
        progress(total - len(waiting), total)
        turn = not turn and not ranked
        if turn and (chosen := _roomiest(sizes, bounds, wanted, room)):
            del sizes[chosen]
            room *= 1.0 if settle(chosen) else 0.7
            continue
        bound, near, layout = heapq.heappop(waiting)
        if layout in settled:
            continue
        enough = len(ranked) >= wanted.top_k and bound > wanted.value(ranked[wanted.top_k - 1])
        if enough or time.monotonic() > wanted.deadline:
            return Found(tuple(ranked[: wanted.top_k]), tuple(rejected), len(waiting) + 1, complete=enough)
        if near:
            settle(layout)
            continue
        try:
            size = bounds.closer_bytes(layout)
            least = size if wanted.objective == "memory" else wanted.weighed(layout, bounds.closer(layout))
        except CompileError as error:
            rejected.append(Rejected(layout, f"{error.code} {error.message}"))
            continue
        if short := _lack(layout, size, wanted):
            rejected.append(short)
        else:
            heapq.heappush(waiting, (max(bound, least), True, layout))
    progress(total, total)
    return Found(tuple(ranked[: wanted.top_k]), tuple(rejected), 0, complete=True)


def _lack(layout: L, least: float, wanted: Wanted) -> Rejected[L] | None:
    if least <= wanted.memory_bytes:
        return None
    reason = f"takes at least {gib(least)} of {gib(wanted.memory_bytes)}"
    return Rejected(layout, reason, least - wanted.memory_bytes)


def _roomiest(sizes: dict[L, float], bounds: Bounds[L], wanted: Wanted, room: float) -> L | None:
    """The fastest of the layouts that leave all but ``room`` of the memory free, as far as is known of them. ``sizes``:
    what each takes at least; brought nearer to the truth for those that are looked at."""
    limit = room * wanted.memory_bytes
    while time.monotonic() <= wanted.deadline:
        found = min(
            (layout for layout, size in sizes.items() if size <= limit),
            key=lambda layout: (bounds.seconds(layout), layout),
            default=None,
        )
        if found is None or bounds.closer_bytes(found) <= limit:
            return found
        sizes[found] = bounds.closer_bytes(found)
    return None
