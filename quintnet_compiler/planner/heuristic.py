"""The order in which a search tries layouts: those that are predicted to be fast and likely to fit come first.

Measured-against-predicted ratios of layouts that were tried correct the predictions of similar layouts.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

# Factors on a learned ratio, by how similar the layouts are from which it was learned: less similar ones get a larger
# benefit of the doubt, so that they are tried before the last percent of well-known ones.
DOUBT_FACTORS = (0.99, 0.97, 0.94, 0.92)
UNSEEN_FACTOR = 0.88  # for layouts that share no key with any that was tried
L = TypeVar("L", bound=Hashable)


class LearnedRatios:
    """Ratios of actual to predicted values, by similarity key.

    ``keys`` of a layout are ordered: the first is shared with the most similar layouts.
    """

    def __init__(self) -> None:
        self.ratios: dict[Hashable, float] = {}

    def learn(self, keys: Sequence[Hashable], ratio: float) -> None:
        """Average ``ratio`` geometrically into the stored ratios, up to the first key that has one already."""
        for key in (*keys, None):
            is_stored = key in self.ratios
            self.ratios[key] = math.sqrt(self.ratios.get(key, ratio) * ratio)
            if is_stored:
                break

    def factor(self, keys: Sequence[Hashable]) -> float:
        """Return the ratio that is stored for the most specific key, less the benefit of the doubt."""
        for key, doubt in zip(keys, DOUBT_FACTORS, strict=True):
            if key in self.ratios:
                return self.ratios[key] * doubt
        return self.ratios.get(None, 1.0) * (UNSEEN_FACTOR if self.ratios else 1.0)


class LayoutHeuristic(Generic[L]):
    """A queue of layouts, the most promising first.

    Layouts that share their first similarity key form a group, ordered by their cost bounds. The queue holds the next
    layout of each group.

    Attributes:
        open_layouts: layouts that the search has not settled (it removes them), with lower bounds of their memory.
        memory: bytes that a layout may take.
        bounds: lower bounds of what layouts cost.
        rough_cost: returns a rough prediction of what a layout costs.
        similarity: returns a layout's similarity keys, the most specific first.
    """

    def __init__(
        self,
        open_layouts: Mapping[L, float],
        memory: float,
        bounds: Mapping[L, float],
        rough_cost: Callable[[L], float],
        similarity: Callable[[L], tuple[Hashable, ...]],
    ) -> None:
        self.open_layouts, self.memory, self.bounds = open_layouts, memory, bounds
        self.rough_cost, self.similarity = rough_cost, similarity
        self.cost_ratios, self.memory_ratios = LearnedRatios(), LearnedRatios()
        self.keys: dict[Hashable, tuple[Hashable, ...]] = {}
        self.groups: dict[Hashable, list[L]] = defaultdict(list)
        for layout in sorted(open_layouts, key=lambda layout: (bounds[layout], layout)):
            group, *_ = keys = similarity(layout)
            self.keys[group] = keys
            self.groups[group].append(layout)
        self.predictions: dict[L, float] = {}
        self._fill_queue()

    def next(self, worst: float) -> L | None:
        """Return the most promising layout that may cost less than ``worst``.

        None if no layout is likely to fit and predicted to cost less. As long as nothing fits (``worst`` is infinite),
        layouts that are unlikely to fit are returned too.
        """
        while self.queue or self._forget_memory(worst):
            promised, layout, position, group = heapq.heappop(self.queue)
            if layout not in self.open_layouts or self.bounds[layout] >= worst:
                self._push(group, position + 1)
                continue
            cost = self._predicted(layout) * self.cost_ratios.factor(self.keys[group])
            if promised < cost:  # something was learned since it was pushed
                heapq.heappush(self.queue, (cost, layout, position, group))
            elif cost >= worst:
                heapq.heappush(self.queue, (cost, layout, position, group))
                return None
            else:
                self._push(group, position + 1)
                return layout
        return None

    def _forget_memory(self, worst: float) -> bool:
        """Drop the learned memory ratios if nothing fits yet; return whether that queued any layout."""
        if worst < math.inf or not self.memory_ratios.ratios:
            return False
        self.memory_ratios = LearnedRatios()
        self._fill_queue()
        return bool(self.queue)

    def learn(self, layout: L, cost: float, size: float) -> None:
        """Record what a layout that was tried costs and takes; call it before the layout is settled."""
        keys = self.similarity(layout)
        if keys[0] in self.cost_ratios.ratios:
            return
        concerns_one_group = keys[1] in self.cost_ratios.ratios
        if (prediction := self._predicted(layout)) > 0:
            self.cost_ratios.learn(keys, cost / prediction)
        if (bound := self.open_layouts[layout]) > 0:
            self.memory_ratios.learn(keys, size / bound)
        if concerns_one_group:
            self._push(keys[0], 0)
        else:
            self._fill_queue()

    def _predicted(self, layout: L) -> float:
        if layout not in self.predictions:
            self.predictions[layout] = max(self.bounds[layout], self.rough_cost(layout))
        return self.predictions[layout]

    def _fill_queue(self) -> None:
        self.queue: list[tuple[float, L, int, Hashable]] = []
        for group in self.groups:
            self._push(group, 0)

    def _push(self, group: Hashable, start: int) -> None:
        """Queue a group's next layout that is likely to fit, with a lower estimate of its cost."""
        layouts, keys = self.groups[group], self.keys[group]
        limit = self.memory / self.memory_ratios.factor(keys)
        for position in range(start, len(layouts)):
            layout = layouts[position]
            if self.open_layouts.get(layout, math.inf) <= limit:
                cost = self.predictions.get(layout, self.bounds[layout]) * self.cost_ratios.factor(keys)
                heapq.heappush(self.queue, (cost, layout, position, group))
                return
