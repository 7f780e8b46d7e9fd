"""Best-first search: layouts in the order of their lower bounds, until none that is open can be among the best."""

from __future__ import annotations

import heapq
import math
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from ..core.errors import CompileError

if TYPE_CHECKING:
    from .heuristic import LayoutHeuristic

Objective = Literal["time", "memory", "cost"]
RESERVED_SHARE = 0.08  # of a device's memory, which plans leave free


class PricedLayout(Protocol):
    """A layout (anything that can be ordered and printed) with its cost."""

    @property
    def layout(self) -> Any: ...

    @property
    def seconds(self) -> float: ...

    @property
    def claimed_bytes(self) -> float: ...


PROOF_SHARE = 1 / 7  # work for the proof that no other layout is better, as a share of that for promising layouts
LAYOUTS_PER_FUNCTIONS = 4  # layouts that are evaluated at once when the functions that they share become known
FASTER_VARIANT_FITS = "the same fits with less computed or gathered again, and is faster"
L = TypeVar("L")
L_contra = TypeVar("L_contra", contravariant=True)
E = TypeVar("E", bound=PricedLayout)


@dataclass(frozen=True)
class Rejected(Generic[L]):
    """A layout that cannot be used, and why; ``lacks``: the missing bytes, where memory is the reason."""

    layout: L
    reason: str
    lacks: float = math.inf


@dataclass(frozen=True)
class SearchResult(Generic[L, E]):
    """The outcome of a search.

    Attributes:
        ranked: feasible layouts, best first.
        rejected: layouts that were examined and cannot be used.
        left: the number of layouts that were never examined.
        ended: why the search ended: ``"proof"`` that no other layout can be among the best, or because its ``"work"``
            or its ``"time"`` was used up.
        gap: the share by which a layout that was never examined may cost less than the best, by its bound: 0 where the
            best is proven, 1 where there is no bound.
    """

    ranked: tuple[E, ...]
    rejected: tuple[Rejected[L], ...]
    left: int
    ended: Literal["proof", "work", "time"]
    gap: float = 0.0

    @property
    def complete(self) -> bool:
        """Return whether the search ended with a proof."""
        return self.ended == "proof"

    def unfinished(self, effort: SearchEffort) -> str:
        """Return the message that time ran out before any layout was found."""
        examined = f"{len(self.rejected)} do not, and {self.left} were not looked at"
        return f"in {effort.seconds:.3g} s no layout was found that fits: {examined}"

    def failure(self, effort: SearchEffort) -> str:
        """Return why no layout was found."""
        if not self.complete:
            return self.unfinished(effort)
        nearest = min(self.rejected, key=lambda rejected: rejected.lacks, default=None)
        return f"{nearest.layout}: {nearest.reason}" if nearest else "no such layout"


class SearchBounds(Protocol[L_contra]):
    """Lower bounds of what layouts cost."""

    def seconds(self, layout: L_contra, /) -> float:
        """Return a cheap lower bound of the step time."""
        ...

    def narrow(self, layouts: Iterable[L_contra], /) -> None:
        """Restrict the bounds to ``layouts``: from now on they need not hold for any other."""
        ...

    @property
    def steps(self) -> int:
        """Return the number of closer bounds, each tighter and more expensive than the previous."""
        ...

    def closer_seconds(self, layout: L_contra, step: int, /) -> float:
        """Return a closer lower bound of the step time; 0 where there is none."""
        ...

    def functions(self, layout: L_contra, /) -> Hashable:
        """Return the key of the functions that a layout compiles to; layouts with known functions are cheap."""
        ...

    def new_functions(self) -> Sequence[Hashable]:
        """Return the functions that became known since the previous call."""
        ...

    def rough_seconds(self, layout: L_contra, /) -> float:
        """Return a rough step time: it decides the order in which layouts are tried, never which are left out."""
        ...

    def similarity(self, layout: L_contra, /) -> tuple[Hashable, ...]:
        """Return four keys, the most specific first: ``rough_seconds`` errs alike for layouts that share a key."""
        ...

    def bytes(self, layout: L_contra, /) -> float:
        """Return a cheap lower bound of the memory on the fullest rank."""
        ...

    def closer_bytes(self, layout: L_contra, step: int, /) -> float:
        """Return a closer lower bound of the memory on the fullest rank."""
        ...


@dataclass(frozen=True)
class SearchEffort:
    """When a search ends without a proof.

    A search that has found a layout ends after ``work``, or after two thirds of it without an improvement. Work is
    counted in compiled operators of all layouts, so that it is the same on every machine. Any search ends after
    ``seconds``. After half of the work, a proof for the first layout is enough; the others are then the best of those
    that were evaluated.
    """

    work: float = 8_500
    seconds: float = 90.0

    @property
    def patience(self) -> float:
        """Return the work after which a search without an improvement ends."""
        return self.work * 2 / 3


@dataclass(frozen=True)
class Wanted:
    """The objective of a search, and its limits.

    Attributes:
        top_k: the number of layouts.
        objective: what is minimised.
        memory_bytes: what a layout may take.
        deadline: when the search ends, in the seconds of ``time.monotonic``.
        devices: returns the number of devices of a layout, for the objective ``"cost"``.
        work: the work that a search may do once it has found a layout, the same on every machine.
        patience: the same, since its last improvement.
        spent: returns the work done so far.
    """

    top_k: int
    objective: Objective
    memory_bytes: float
    deadline: float
    devices: Callable[[Any], int] = lambda layout: 1
    work: float = math.inf
    patience: float = math.inf
    spent: Callable[[], float] = lambda: 0.0

    def value(self, priced: PricedLayout) -> float:
        """Return what the search minimises."""
        if self.objective == "memory":
            return float(priced.claimed_bytes)
        return self.weighted(priced.layout, priced.seconds)

    def weighted(self, layout: Any, seconds: float) -> float:
        """Return seconds, or device-seconds for the objective ``"cost"``."""
        return seconds * self.devices(layout) if self.objective == "cost" else seconds


def search_layouts(
    layouts: Iterable[L],
    evaluate: Callable[[L], tuple[L, E]],
    bounds: SearchBounds[L],
    wanted: Wanted,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> SearchResult[L, E]:
    """Evaluate layouts until the best are known, or work or time is used up.

    ``evaluate`` returns a layout and its cost. The layout may be a faster variant of the argument, and the cost is that
    of the best way to slice its parameters; the bounds hold for all of these.

    Most of the work goes to the layouts that :class:`.heuristic.LayoutHeuristic` proposes, so that good ones are found
    early. The rest goes to those with the lowest bounds, which proves that no other is better: such a layout is put
    back into the queue with each closer bound before it is evaluated. When functions become known, a few layouts that
    share them and may be the best are evaluated at once: that is cheap, and the heuristic learns from it.
    """
    return _Search(evaluate, bounds, wanted).search(layouts, progress)


class _Search(Generic[L, E]):
    def __init__(self, evaluate: Callable[[L], tuple[L, E]], bounds: SearchBounds[L], wanted: Wanted) -> None:
        self.evaluate, self.bounds, self.wanted = evaluate, bounds, wanted
        self.ranked: list[E] = []
        self.rejected: list[Rejected[L]] = []
        self.sizes: dict[L, float] = {}  # open layouts, with lower bounds of their memory
        self.heuristic: LayoutHeuristic[L] | None = None
        self.improved_at = 0.0  # the work that was done when the best was found
        self.waiting_for_functions: dict[Hashable, list[L]] = defaultdict(list)
        self.proof_surplus = 1.0  # work done for the proof beyond its share

    def search(self, layouts: Iterable[L], progress: Callable[[int, int], None]) -> SearchResult[L, E]:
        for layout in layouts:
            size = self.bounds.bytes(layout)
            if not self._reject_if_too_large(layout, size):
                self.sizes[layout] = size
        self.bounds.narrow(self.sizes)
        for layout in self.sizes:
            self.waiting_for_functions[self.bounds.functions(layout)].append(layout)
        cost_bounds = {layout: self._cost_bound(layout) for layout in self.sizes}
        self.heuristic = self._new_heuristic(cost_bounds)
        queue = sorted((bound, 0, layout) for layout, bound in cost_bounds.items())
        total = len(queue)
        while queue:
            progress(total - len(self.sizes), total)
            bound, step, layout = queue[0]
            if layout not in self.sizes:
                heapq.heappop(queue)
            elif ended := self._ended(bound):
                return self._result(ended, bound)
            elif self.proof_surplus <= 0 or not self._try_promising():
                heapq.heappop(queue)
                start = self.wanted.spent()
                if step == self.bounds.steps:
                    self._settle(layout)
                elif (closer := self._closer_bound(layout, step)) is not None:
                    heapq.heappush(queue, (max(bound, closer), step + 1, layout))
                self.proof_surplus += 1 + self.wanted.spent() - start
            self._settle_by_new_functions()
        progress(total, total)
        return self._result("proof", math.inf)

    def _new_heuristic(self, cost_bounds: Mapping[L, float]) -> LayoutHeuristic[L] | None:
        """Return the heuristic; None for the objective ``"memory"``, of which there is no rough prediction."""
        from .heuristic import LayoutHeuristic

        if self.wanted.objective == "memory":
            return None
        bounds, wanted = self.bounds, self.wanted

        def rough_cost(layout: L) -> float:
            return wanted.weighted(layout, bounds.rough_seconds(layout))

        return LayoutHeuristic(self.sizes, wanted.memory_bytes, cost_bounds, rough_cost, bounds.similarity)

    def _ended(self, bound: float) -> Literal["proof", "work", "time"] | None:
        spent = self.wanted.spent()
        patient = spent <= min(self.wanted.work, self.improved_at + self.wanted.patience)
        enough = spent > self.wanted.work / 2 or not patient  # for the proof of the first alone
        if bound > self._worst_ranked() or (self.ranked and bound > self._best() and enough):
            return "proof"
        if self.ranked and not patient:
            return "work"
        return "time" if time.monotonic() > self.wanted.deadline else None

    def _result(self, ended: Literal["proof", "work", "time"], bound: float) -> SearchResult[L, E]:
        """Return the result; ``bound``: a lower bound of what open layouts cost."""
        gap = max(0.0, 1 - bound / self.wanted.value(self.ranked[0])) if self.ranked else 1.0
        best = tuple(self.ranked[: self.wanted.top_k])
        return SearchResult(best, tuple(self.rejected), len(self.sizes), ended, gap)

    def _worst_ranked(self) -> float:
        """Return the value that a layout must stay below to be among the best."""
        top_k = self.wanted.top_k
        return self.wanted.value(self.ranked[top_k - 1]) if len(self.ranked) >= top_k else math.inf

    def _cost_bound(self, layout: L) -> float:
        if self.wanted.objective == "memory":
            return self.sizes[layout]
        return self.wanted.weighted(layout, self.bounds.seconds(layout))

    def _closer_bound(self, layout: L, step: int) -> float | None:
        """Return a closer bound of the value; reject the layout and return None if it is too large or impossible."""
        try:
            size = self.bounds.closer_bytes(layout, step)
            if self._reject_if_too_large(layout, size):
                return None
            if self.wanted.objective == "memory":
                return size
            return self.wanted.weighted(layout, self.bounds.closer_seconds(layout, step))
        except CompileError as error:
            self._reject(layout, f"{error.code} {error.message}")
            return None

    def _try_promising(self) -> bool:
        """Settle the most promising layout; return False if there is none."""
        best = self._best()
        layout = self.heuristic.next(best) if self.heuristic else None
        if layout is None:
            return False
        start = self.wanted.spent()
        if self._may_beat(layout, best):
            self._settle(layout)
        self.proof_surplus -= PROOF_SHARE * (1 + self.wanted.spent() - start)
        return True

    def _settle_by_new_functions(self) -> None:
        """Evaluate layouts whose functions became known, if they may be the best: the few most promising."""
        last = self.bounds.steps - 1
        for functions in self.bounds.new_functions():
            layouts = [layout for layout in self.waiting_for_functions.pop(functions, ()) if layout in self.sizes]
            bounds = [(self._closer_bound(layout, last), layout) for layout in layouts]
            candidates = sorted((bound, layout) for bound, layout in bounds if bound is not None)
            for bound, layout in candidates[:LAYOUTS_PER_FUNCTIONS]:
                if layout in self.sizes and bound < self._best():
                    self._settle(layout)

    def _best(self) -> float:
        return self.wanted.value(self.ranked[0]) if self.ranked else math.inf

    def _may_beat(self, layout: L, best: float) -> bool:
        """Return whether no bound but the last excludes that the layout costs less than ``best``."""
        for step in range(self.bounds.steps - 1):
            closer = self._closer_bound(layout, step)
            if closer is None or closer > best:
                return False
        return True

    def _settle(self, layout: L) -> None:
        """Evaluate a layout, and rank or reject it."""
        try:
            variant, priced = self.evaluate(layout)
        except CompileError as error:
            self._reject(layout, f"{error.code} {error.message}")
            return
        if variant != layout:
            self._reject(layout, FASTER_VARIANT_FITS)
            if (layout := variant) not in self.sizes:
                return
        if self.heuristic:
            self.heuristic.learn(layout, self.wanted.value(priced), priced.claimed_bytes)
        if not self._reject_if_too_large(layout, priced.claimed_bytes, "needs"):
            self.sizes.pop(layout, None)
            self.ranked.append(priced)
            self.ranked.sort(key=lambda e: (self.wanted.value(e), e.seconds, e.layout))
            self.improved_at = self.wanted.spent() if self.ranked[0] is priced else self.improved_at

    def _reject_if_too_large(self, layout: L, size: float, takes: str = "takes at least") -> bool:
        from .estimate import bytes_of

        lacks = size - self.wanted.memory_bytes
        if lacks > 0:
            self._reject(layout, f"{takes} {bytes_of(size)} of {bytes_of(self.wanted.memory_bytes)}", lacks)
        return lacks > 0

    def _reject(self, layout: L, reason: str, lacks: float = math.inf) -> None:
        self.sizes.pop(layout, None)
        self.rejected.append(Rejected(layout, reason, lacks))
