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


NEARLY = 1.1  # a layout that takes no more than this times what was guessed is tried at once, and what may be the best
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

    def guess(self, layout: L_contra, /) -> float:
        """What a step takes, roughly: for the order in which layouts are tried, not for leaving one out."""
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

    A layout that is taken up gets its closer bound first, and waits again with that. Three of four are the fastest,
    roughly, of those that are likely to fit: so that good ones are found early.
    """
    return _Search(evaluate, bounds, wanted).run(layouts, progress)


class _Search(Generic[L, E]):
    def __init__(self, evaluate: Callable[[L], E], bounds: Bounds[L], wanted: Wanted) -> None:
        self.evaluate, self.bounds, self.wanted = evaluate, bounds, wanted
        self.ranked: list[E] = []
        self.rejected: list[Rejected[L]] = []
        self.sizes: dict[L, float] = {}  # what each layout that is open takes at least
        self.near: set[L] = set()  # those of which the closer bounds are known
        self.queue: list[tuple[float, L]] = []  # by what they take roughly
        self.parked: list[tuple[float, L]] = []  # those that do not seem to fit
        self.growth = {False: 1.0, True: 1.0}  # how much more it turned out to be, lately: than a bound, than a closer

    def run(self, layouts: Iterable[L], progress: Callable[[int, int], None]) -> Found[L, E]:
        for layout in layouts:
            size = self.bounds.bytes(layout)
            if not self._too_large(layout, size):
                self.sizes[layout] = size
        waiting = sorted((self._least(layout, near=False), False, layout) for layout in self.sizes)
        self.queue = sorted((max(least, self._guess(layout)), layout) for least, _, layout in waiting)
        total, turn = len(waiting), 0
        while waiting:
            progress(total - len(self.sizes), total)
            turn += 1
            if turn % 4 and (chosen := self._likely()) is not None:
                self._settle(chosen)
                continue
            bound, near, layout = heapq.heappop(waiting)
            if layout not in self.sizes:
                continue
            enough = bound > self._worst()
            if enough or time.monotonic() > self.wanted.deadline:
                return self._found(len(self.sizes), complete=enough)
            if near:
                self._settle(layout)
            elif (least := self._closer(layout)) is not None:
                heapq.heappush(waiting, (max(bound, least), True, layout))
        progress(total, total)
        return self._found(0, complete=True)

    def _found(self, left: int, *, complete: bool) -> Found[L, E]:
        return Found(tuple(self.ranked[: self.wanted.top_k]), tuple(self.rejected), left, complete)

    def _worst(self) -> float:
        """What a layout must cost less than to be among the best."""
        top_k = self.wanted.top_k
        return self.wanted.value(self.ranked[top_k - 1]) if len(self.ranked) >= top_k else math.inf

    def _least(self, layout: L, *, near: bool) -> float:
        if self.wanted.objective == "memory":
            return self.bounds.closer_bytes(layout) if near else self.sizes[layout]
        seconds = self.bounds.closer(layout) if near else self.bounds.seconds(layout)
        return self.wanted.weighed(layout, seconds)

    def _closer(self, layout: L) -> float | None:
        """The closer bound; None for what cannot be."""
        try:
            size = self.bounds.closer_bytes(layout)
            if layout not in self.near:
                self._learn(layout, size)
            if not self._too_large(layout, size):
                self.near.add(layout)
                self.sizes[layout] = size
                return self._least(layout, near=True)
        except CompileError as error:
            self._reject(layout, f"{error.code} {error.message}")
        return None

    def _guess(self, layout: L) -> float:
        return 0.0 if self.wanted.objective == "memory" else self.wanted.weighed(layout, self.bounds.guess(layout))

    def _likely(self) -> L | None:
        """The layout that is fastest, roughly, of those that fit if they take as much beyond their bounds as others."""
        worst = self._worst()
        while self.queue and time.monotonic() <= self.wanted.deadline:
            guess, layout = heapq.heappop(self.queue)
            if layout not in self.sizes or self._least(layout, near=False) >= worst:
                continue
            if not self._fits(layout):
                self.parked.append((guess, layout))
            elif layout in self.near:
                return layout
            elif (closer := self._closer(layout)) is not None:
                best = self.wanted.value(self.ranked[0]) if self.ranked else math.inf
                if self._fits(layout) and closer < min(worst, max(best, NEARLY * guess)):
                    return layout
                heapq.heappush(self.queue, (max(guess, closer), layout))
        if not self.queue:  # nothing is likely: what is possible comes next
            self.growth = {False: 1.0, True: 1.0}
            self._unpark()
        return None

    def _unpark(self) -> None:
        self.queue, self.parked = [*self.queue, *self.parked], []
        heapq.heapify(self.queue)

    def _fits(self, layout: L) -> bool:
        near = layout in self.near
        growth = self.growth[True] * (1.0 if near else self.growth[False])
        return self.sizes.get(layout, math.inf) * growth <= self.wanted.memory_bytes

    def _learn(self, layout: L, size: float) -> None:
        near, known = layout in self.near, self.sizes[layout]
        if known > 0:
            self.growth[near] = max(1.0, self.growth[near] ** 0.7 * (size / known) ** 0.3)

    def _settle(self, layout: L) -> None:
        try:
            found = self.evaluate(layout)
        except CompileError as error:
            self._reject(layout, f"{error.code} {error.message}")
            return
        self._learn(layout, found.memory_bytes)
        if not self._too_large(layout, found.memory_bytes, "needs"):
            self.sizes.pop(layout, None)
            self.ranked.append(found)
            self.ranked.sort(key=lambda e: (self.wanted.value(e), e.seconds, e.layout))
            self._unpark()

    def _too_large(self, layout: L, size: float, takes: str = "takes at least") -> bool:
        lacks = size - self.wanted.memory_bytes
        if lacks > 0:
            self._reject(layout, f"{takes} {gib(size)} of {gib(self.wanted.memory_bytes)}", lacks)
        return lacks > 0

    def _reject(self, layout: L, reason: str, lacks: float = math.inf) -> None:
        self.sizes.pop(layout, None)
        self.rejected.append(Rejected(layout, reason, lacks))
