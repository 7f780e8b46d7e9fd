"""Where stages begin: the cut whose step is the shortest, as its schedule runs it."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...schedules.schedule import Op
from .partition import Array, balanced_starts
from .stage_loads import EMPTY, Places, StageLoads
from .step_clock import StepClock

Cuts = Places  # [k, s]: the number of the place where stage s + 1 of cut k begins

# A step of stages whose work varies by its own mean counts as so much longer, as ranks of an even cut hold alike, and
# so does this share of all that a microbatch sends, as wires are not a pipeline's own: prices are no more exact.
UNEVEN = 0.1
TRAVELS = 0.1
TRIED = 20_000  # up to so many cuts all are tried
WORK = 30_000_000  # else how many actions are run, each of one cut, after the first cuts
SLOPES = (-0.5, -0.25, 0.25, 0.5)  # of first cuts: how much more, or less, work later stages have
OVERHEAD = 1000  # what running an action of any number of cuts costs besides, in actions of one cut


@dataclass(frozen=True)
class FastestCut:
    """Cuts of ``loads`` at its places, without those ``inside`` what must not be cut, run by ``clock``."""

    loads: StageLoads
    clock: StepClock
    inside: frozenset[int] = frozenset()

    def starts(self) -> list[int]:
        """Where stages 1, 2, ... begin.

        Few cuts are all tried. Else the search begins at cuts whose slowest stage is as fast as it can be (dynamic
        programming, as in PipeDream, Narayanan et al. 2019), for even and for slanting shares of the work, and moves
        boundaries, one or some that follow each other, as long as a step gets shorter.
        """
        count = self.clock.schedule.num_stages - 1
        if math.comb(len(self.places) - 2, count) <= TRIED:
            every = itertools.combinations(range(1, len(self.places) - 1), count)
            best, _ = self._best(np.array(list(every), np.int64).reshape(-1, count))
        else:
            best, score = self._best(self._first())
            left = WORK
            while (left := left - len(self.clock.order) * (OVERHEAD + len(moved := self._moved(best)))) > 0:
                found, other = self._best(moved)
                if other >= score:
                    break
                best, score = found, other
        return [int(self.places[index]) for index in best]

    @cached_property
    def places(self) -> Places:
        return np.array([place for place in self.loads.places if place not in self.inside], np.int64)

    @cached_property
    def _before(self) -> dict[Op, Array]:
        """Seconds of each kind of action before each place, if it were all one stage."""
        one = self.loads
        halves = {Op.FORWARD: one.forward, Op.BACKWARD: one.input + one.weight, Op.BACKWARD_INPUT: one.input,
                  Op.BACKWARD_WEIGHT: one.weight}  # fmt: skip
        return {op: halves[op][self.places] for op in self.clock.ops}

    def _best(self, cuts: Cuts) -> tuple[Cuts, float]:
        """The first of those with the least score: seconds of a step, and a little more for what is uneven or sent."""
        last = len(self.places) - 1
        edges = np.pad(cuts.T, ((1, 1), (0, 0)), constant_values=((0, last), (0, 0)))
        times = {op: np.diff(before[edges], axis=0) for op, before in self._before.items()}
        work: Array = sum(times.values(), np.zeros(edges.shape)[1:])
        empty = self.loads.empty(self.places[edges[:-1]], self.places[edges[1:]])
        sends = self.loads.sends[:, self.places[edges[1:-1]]]
        seconds = self.clock.seconds(times, sends) + TRAVELS * sends.sum(axis=(0, 1))
        mean = work.mean(axis=0)
        variance = np.divide(work.var(axis=0), mean**2, out=np.zeros_like(mean), where=mean > 0)
        score = seconds * (1 + UNEVEN * variance) + EMPTY * empty.sum(axis=0)
        best = int(np.argmin(score))
        return cuts[best], float(score[best])

    def _first(self) -> Cuts:
        count = self.clock.schedule.num_stages
        work: Array = sum(self._before.values(), np.zeros(len(self.places)))
        seconds = work[None, :] - work[:, None]
        seconds += EMPTY * self.loads.empty(self.places[:, None], self.places[None, :])
        sends = self.loads.sends[:, self.places].sum(axis=0)
        slopes = [1 + slope * (np.arange(count) / (count - 1) - 0.5) for slope in SLOPES]
        found = [balanced_starts(seconds, count), balanced_starts(seconds + sends[:, None], count)]
        return np.array([*found, *(balanced_starts(seconds, count, slope) for slope in slopes)], np.int64)

    def _moved(self, best: Cuts) -> Cuts:
        """Every cut that has one boundary elsewhere, or up to four that follow each other as far to one side."""
        last, count = len(self.places) - 1, len(best)
        edges = [0, *(int(place) for place in best), last]
        found = []
        for first in range(1, count + 1):
            for end in range(first, min(first + 4, count + 1)):
                far = range(1 + edges[first - 1] - edges[first], edges[end + 1] - edges[end])
                if end > first:  # several: a few places
                    far = range(-min(8, -far.start), min(8, far.stop - 1) + 1)
                for step in far:
                    moved = best.copy()
                    moved[first - 1 : end] += step
                    found.append(moved)
        return np.array(found, np.int64)
