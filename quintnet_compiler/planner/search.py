"""Best first: layouts in the order of what they cost at least, until none that is left can be among the best."""

from __future__ import annotations

import heapq
import math
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from ..core.errors import CompileError
from .estimate import bytes_of
from .heuristic import LayoutHeuristic

Objective = Literal["time", "memory", "cost"]


class PricedLayout(Protocol):
    """A layout (anything that can be ordered and printed) with what it costs."""

    @property
    def layout(self) -> Any: ...

    @property
    def seconds(self) -> float: ...

    @property
    def claimed_bytes(self) -> float: ...


PROOF = 1 / 7  # of the work for promising layouts goes into the proof that no other is better
HARVEST = 4  # layouts of the same functions that are evaluated as soon as these are known
SOONER = "the same fits with less computed or gathered again, and is faster"
L = TypeVar("L")
L_contra = TypeVar("L_contra", contravariant=True)
E = TypeVar("E", bound=PricedLayout)


@dataclass(frozen=True)
class Rejected(Generic[L]):
    """A layout that cannot be used, and why; with how many bytes it lacks, where that is the reason."""

    layout: L
    reason: str
    lacks: float = math.inf


@dataclass(frozen=True)
class SearchResult(Generic[L, E]):
    """``ranked``: feasible layouts, best first. ``rejected``: the others that were looked at. ``left``: how many were
    never looked at. ``ended``: by what the search did: ``"proof"`` that what is left cannot be among the best, its
    ``"work"`` or its ``"time"``. ``gap``: the share by which some layout that is left may cost less than the best that
    was found, by its bound: 0 where that is proven best, 1 where nothing is known."""

    ranked: tuple[E, ...]
    rejected: tuple[Rejected[L], ...]
    left: int
    ended: Literal["proof", "work", "time"]
    gap: float = 0.0

    @property
    def complete(self) -> bool:
        return self.ended == "proof"


class SearchBounds(Protocol[L_contra]):
    """What a layout costs at least: never more than what it costs."""

    def seconds(self, layout: L_contra, /) -> float:
        """Of a step; cheap to ask."""
        ...

    def narrow(self, layouts: Iterable[L_contra], /) -> None:
        """From now on bounds need only be true of these."""
        ...

    @property
    def steps(self) -> int:
        """How many closer bounds there are, each nearer to the truth and dearer to ask than the one before."""
        ...

    def closer(self, layout: L_contra, step: int, /) -> float:
        """The same, by a closer bound; 0 where nothing more is known."""
        ...

    def functions(self, layout: L_contra, /) -> Hashable:
        """What layouts have in common of which all can be evaluated where one can: for next to nothing, if they are
        known."""
        ...

    def news(self) -> Sequence[Hashable]:
        """Functions that are known, and were not when this was asked before."""
        ...

    def guess(self, layout: L_contra, /) -> float:
        """What a step takes, roughly: for the order in which layouts are tried, not for leaving one out."""
        ...

    def alike(self, layout: L_contra, /) -> tuple[Hashable, ...]:
        """What it has in common with layouts of which ``guess`` is wrong by as much, the most first: four values."""
        ...

    def bytes(self, layout: L_contra, /) -> float:
        """On the fullest rank; cheap to ask."""
        ...

    def closer_bytes(self, layout: L_contra, step: int, /) -> float:
        """The same, by a closer bound."""
        ...


@dataclass(frozen=True)
class SearchEffort:
    """When a search ends that proves nothing: once it found something and has done so much ``work``, which is the same
    on every machine (in operators that were compiled, for all layouts together), or two thirds of it since it last
    found anything better; or after so many ``seconds``. After half of the work, the proof that the first is the best
    is enough, and the others are the best of those that were evaluated."""

    work: float = 8_500
    seconds: float = 90.0

    @property
    def patience(self) -> float:
        return self.work * 2 / 3


@dataclass(frozen=True)
class Wanted:
    """How many plans, by what, from how much memory, until when (of time.monotonic). ``devices``: how many a layout
    uses, where its cost counts. ``work``: how much the search may do once it has found something, ``patience``: since
    it last found anything better, and ``spent``: how much was done: the same on every machine."""

    top_k: int
    objective: Objective
    memory_bytes: float
    deadline: float
    devices: Callable[[Any], int] = lambda layout: 1
    work: float = math.inf
    patience: float = math.inf
    spent: Callable[[], float] = lambda: 0.0

    def value(self, found: PricedLayout) -> float:
        if self.objective == "memory":
            return float(found.claimed_bytes)
        return self.weighed(found.layout, found.seconds)

    def weighed(self, layout: Any, seconds: float) -> float:
        return seconds * self.devices(layout) if self.objective == "cost" else seconds


def search(
    layouts: Iterable[L],
    evaluate: Callable[[L], tuple[L, E]],
    bounds: SearchBounds[L],
    wanted: Wanted,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> SearchResult[L, E]:
    """Evaluate layouts until the best are known, or work or time is over. ``evaluate`` returns the layout that is
    meant, which may be another that does the same in less time, and what that costs at best: of all that only store
    parameters otherwise than it, which the bounds hold for, too.

    Most of the work is for what is :class:`.heuristic.LayoutHeuristic`, so that good layouts are found early. The
    rest is for
    those that cost least at least, which proves that no other is better: such a layout gets its closer bounds first,
    and waits again with each. Where work, also that for a bound, made functions known, layouts of these functions are
    evaluated at once, those that may be the best: it takes next to nothing, and others learn from it.
    """
    return _Search(evaluate, bounds, wanted).run(layouts, progress)


class _Search(Generic[L, E]):
    def __init__(self, evaluate: Callable[[L], tuple[L, E]], bounds: SearchBounds[L], wanted: Wanted) -> None:
        self.evaluate, self.bounds, self.wanted = evaluate, bounds, wanted
        self.ranked: list[E] = []
        self.rejected: list[Rejected[L]] = []
        self.sizes: dict[L, float] = {}  # what each layout that is open takes at least
        self.promising: LayoutHeuristic[L] | None = None
        self.better = 0.0  # the work that was done when the best was found
        self.unknown: dict[Hashable, list[L]] = defaultdict(list)  # layouts by functions that are not known yet
        self.proving = 1.0  # what was done for the proof, less its part of all else

    def run(self, layouts: Iterable[L], progress: Callable[[int, int], None]) -> SearchResult[L, E]:
        for layout in layouts:
            size = self.bounds.bytes(layout)
            if not self._too_large(layout, size):
                self.sizes[layout] = size
        self.bounds.narrow(self.sizes)
        for layout in self.sizes:
            self.unknown[self.bounds.functions(layout)].append(layout)
        least = {layout: self._least(layout) for layout in self.sizes}
        self.promising = self._promising(least)
        waiting = sorted((bound, 0, layout) for layout, bound in least.items())
        total = len(waiting)
        while waiting:
            progress(total - len(self.sizes), total)
            bound, step, layout = waiting[0]
            if layout not in self.sizes:
                heapq.heappop(waiting)
            elif ended := self._ended(bound):
                return self._found(ended, bound)
            elif self.proving <= 0 or not self._try():
                heapq.heappop(waiting)
                before = self.wanted.spent()
                if step == self.bounds.steps:
                    self._settle(layout)
                elif (closer := self._closer(layout, step)) is not None:
                    heapq.heappush(waiting, (max(bound, closer), step + 1, layout))
                self.proving += 1 + self.wanted.spent() - before
            self._harvest()
        progress(total, total)
        return self._found("proof", math.inf)

    def _promising(self, least: Mapping[L, float]) -> LayoutHeuristic[L] | None:
        """Nothing is guessed of memory."""
        if self.wanted.objective == "memory":
            return None
        bounds, wanted = self.bounds, self.wanted
        return LayoutHeuristic(
            self.sizes, wanted.memory_bytes, least, lambda one: wanted.weighed(one, bounds.guess(one)), bounds.alike
        )

    def _ended(self, bound: float) -> Literal["proof", "work", "time"] | None:
        spent = self.wanted.spent()
        patient = spent <= min(self.wanted.work, self.better + self.wanted.patience)
        enough = spent > self.wanted.work / 2 or not patient  # for the proof of the first alone
        if bound > self._worst() or (self.ranked and bound > self._best() and enough):
            return "proof"
        if self.ranked and not patient:
            return "work"
        return "time" if time.monotonic() > self.wanted.deadline else None

    def _found(self, ended: Literal["proof", "work", "time"], least: float) -> SearchResult[L, E]:
        """``least``: what any layout that is left costs at least."""
        gap = max(0.0, 1 - least / self.wanted.value(self.ranked[0])) if self.ranked else 1.0
        best = tuple(self.ranked[: self.wanted.top_k])
        return SearchResult(best, tuple(self.rejected), len(self.sizes), ended, gap)

    def _worst(self) -> float:
        """What a layout must cost less than to be among the best."""
        top_k = self.wanted.top_k
        return self.wanted.value(self.ranked[top_k - 1]) if len(self.ranked) >= top_k else math.inf

    def _least(self, layout: L) -> float:
        if self.wanted.objective == "memory":
            return self.sizes[layout]
        return self.wanted.weighed(layout, self.bounds.seconds(layout))

    def _closer(self, layout: L, step: int) -> float | None:
        """The closer bound; None for what cannot be."""
        try:
            size = self.bounds.closer_bytes(layout, step)
            if not self._too_large(layout, size):
                memory = self.wanted.objective == "memory"
                return size if memory else self.wanted.weighed(layout, self.bounds.closer(layout, step))
        except CompileError as error:
            self._reject(layout, f"{error.code} {error.message}")
        return None

    def _try(self) -> bool:
        """Settle the most promising layout; False if there is none."""
        best = self._best()
        layout = self.promising.next(best) if self.promising else None
        if layout is None:
            return False
        before = self.wanted.spent()
        if self._may_be(layout, best):
            self._settle(layout)
        self.proving -= PROOF * (1 + self.wanted.spent() - before)
        return True

    def _harvest(self) -> None:
        """Evaluate layouts of functions that have become known, if they may be the best: a few, the most promising."""
        for functions in self.bounds.news():
            found = [layout for layout in self.unknown.pop(functions, ()) if layout in self.sizes]
            near = [(closer, one) for one in found if (closer := self._closer(one, self.bounds.steps - 1)) is not None]
            for closer, layout in sorted(near)[:HARVEST]:
                if layout in self.sizes and closer < self._best():
                    self._settle(layout)

    def _best(self) -> float:
        return self.wanted.value(self.ranked[0]) if self.ranked else math.inf

    def _may_be(self, layout: L, best: float) -> bool:
        """Whether no bound but the last says that the layout cannot cost less than ``best``."""
        for step in range(self.bounds.steps - 1):
            closer = self._closer(layout, step)
            if closer is None or closer > best:
                return False
        return True

    def _settle(self, layout: L) -> None:
        try:
            meant, found = self.evaluate(layout)
        except CompileError as error:
            self._reject(layout, f"{error.code} {error.message}")
            return
        if meant != layout:
            self._reject(layout, SOONER)
            if (layout := meant) not in self.sizes:
                return
        if self.promising:
            self.promising.learn(layout, self.wanted.value(found), found.claimed_bytes)
        if not self._too_large(layout, found.claimed_bytes, "needs"):
            self.sizes.pop(layout, None)
            self.ranked.append(found)
            self.ranked.sort(key=lambda e: (self.wanted.value(e), e.seconds, e.layout))
            self.better = self.wanted.spent() if self.ranked[0] is found else self.better

    def _too_large(self, layout: L, size: float, takes: str = "takes at least") -> bool:
        lacks = size - self.wanted.memory_bytes
        if lacks > 0:
            self._reject(layout, f"{takes} {bytes_of(size)} of {bytes_of(self.wanted.memory_bytes)}", lacks)
        return lacks > 0

    def _reject(self, layout: L, reason: str, lacks: float = math.inf) -> None:
        self.sizes.pop(layout, None)
        self.rejected.append(Rejected(layout, reason, lacks))
