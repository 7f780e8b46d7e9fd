"""Which layout to try next: the fastest, roughly, of those that are likely to fit. Layouts that were tried say how much
to believe of what is guessed about those that are like them."""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

# What layouts may take less than others made believe that have as much in common, and in all that nobody knows of: so
# little-known ones are tried before the last percent of well-known ones.
DOUBT = (0.99, 0.97, 0.94, 0.92)
NOBODY = 0.88
L = TypeVar("L", bound=Hashable)


class Learned:
    """How many times what was expected layouts turned out to take. ``kinds``: what layouts have in common, the most
    first."""

    def __init__(self) -> None:
        self.ratios: dict[Hashable, float] = {}

    def learn(self, kinds: Sequence[Hashable], ratio: float) -> None:
        """What others with as much in common took counts half; then it says nothing new of those with less."""
        for kind in (*kinds, None):
            known = kind in self.ratios
            self.ratios[kind] = math.sqrt(self.ratios.get(kind, ratio) * ratio)
            if known:
                break

    def factor(self, kinds: Sequence[Hashable]) -> float:
        for kind, doubt in zip(kinds, DOUBT, strict=True):
            if kind in self.ratios:
                return self.ratios[kind] * doubt
        return self.ratios.get(None, 1.0) * (NOBODY if self.ratios else 1.0)


class LayoutHeuristic(Generic[L]):
    """``left``: layouts that are open (a search takes out what it settles), and what they take of ``memory`` at least.
    ``least``: what each costs at least. ``guess``: roughly. ``alike``: what it has in common with others, the most
    first; those that have the first in common stand in one group, in the order of ``least``."""

    def __init__(
        self,
        left: Mapping[L, float],
        memory: float,
        least: Mapping[L, float],
        guess: Callable[[L], float],
        alike: Callable[[L], tuple[Hashable, ...]],
    ) -> None:
        self.left, self.memory, self.least = left, memory, least
        self.guess, self.alike = guess, alike
        self.cost, self.size = Learned(), Learned()
        self.kinds: dict[Hashable, tuple[Hashable, ...]] = {}
        self.groups: dict[Hashable, list[L]] = defaultdict(list)
        for layout in sorted(left, key=lambda one: (least[one], one)):
            first, *_ = kinds = alike(layout)
            self.kinds[first] = kinds
            self.groups[first].append(layout)
        self.guessed: dict[L, float] = {}
        self._order()

    def next(self, worst: float) -> L | None:
        """The most promising layout that may cost less than ``worst``; None if no other is likely to fit, or promises
        to cost less. As long as none fits, what is unlikely is tried, too."""
        while self.queue or self._forget(worst):
            promised, layout, place, kind = heapq.heappop(self.queue)
            if layout in self.left and self.least[layout] < worst:
                promises = self._guess(layout) * self.cost.factor(self.kinds[kind])
                if promised < promises or promises >= worst:
                    heapq.heappush(self.queue, (promises, layout, place, kind))
                    if promised < promises:
                        continue
                    return None
                self._push(kind, place + 1)
                return layout
            self._push(kind, place + 1)
        return None

    def _forget(self, worst: float) -> bool:
        """What was learned of memory, if nothing is left that promises to fit; False if there is nothing to forget."""
        if worst < math.inf or not self.size.ratios:
            return False
        self.size = Learned()
        self._order()
        return bool(self.queue)

    def learn(self, layout: L, cost: float, size: float) -> None:
        """What a layout that was tried costs and takes; ``left`` has it still."""
        kinds = self.alike(layout)
        if kinds[0] in self.cost.ratios:
            return
        little = kinds[1] in self.cost.ratios
        if (guess := self._guess(layout)) > 0:
            self.cost.learn(kinds, cost / guess)
        if (least := self.left[layout]) > 0:
            self.size.learn(kinds, size / least)
        if little:  # of one group
            self._push(kinds[0], 0)
        else:
            self._order()

    def _guess(self, layout: L) -> float:
        if layout not in self.guessed:
            self.guessed[layout] = max(self.least[layout], self.guess(layout))
        return self.guessed[layout]

    def _order(self) -> None:
        self.queue: list[tuple[float, L, int, Hashable]] = []
        for kind in self.groups:
            self._push(kind, 0)

    def _push(self, kind: Hashable, start: int) -> None:
        """The next layout of a group that is likely to fit, for what it promises at least."""
        group, kinds = self.groups[kind], self.kinds[kind]
        most = self.memory / self.size.factor(kinds)
        for place in range(start, len(group)):
            if self.left.get(group[place], math.inf) <= most:
                layout = group[place]
                promises = self.guessed.get(layout, self.least[layout]) * self.cost.factor(kinds)
                heapq.heappush(self.queue, (promises, layout, place, kind))
                return
