"""Search for the cut into stages whose step is the shortest under its schedule."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...schedules.schedule import Op
from .partition import Array, balanced_starts
from .stage_loads import EMPTY_STAGE_SECONDS, Places, StageLoads
from .step_clock import StepClock

Cuts = Places  # [k, s]: the number of the place where stage s + 1 of cut k begins

# Tie breakers, as large as prices are inexact: ranks of an even cut hold equal memory, and others use the wires, too.
UNEVEN_PENALTY = 0.1  # share of a step that is added when the standard deviation of stages' work is its mean
SEND_PENALTY = 0.1  # share of a microbatch's time on the wire that is added
MAX_EXHAUSTIVE_CUTS = 20_000  # up to so many cuts all are tried
SEARCH_ACTIONS = 30_000_000  # simulated by the search after the first cuts, counted for each cut
SLOPES = (-0.5, -0.25, 0.25, 0.5)  # of first cuts: the share by which the last stage has more work than the first
CALL_OVERHEAD_ACTIONS = 1000  # cost of one vectorized action, in actions of one cut


@dataclass(frozen=True)
class FastestCut:
    """A search among cuts at the places of ``loads`` that are not in ``inside``; ``clock`` times them."""

    loads: StageLoads
    clock: StepClock
    inside: frozenset[int] = frozenset()

    def starts(self) -> list[int]:
        """Return the places where stages 1, 2, ... begin.

        If there are few cuts, all are tried. Else the search begins at cuts whose slowest stage is as fast as possible
        (dynamic programming, as in PipeDream, Narayanan et al. 2019), for equal and for sloping shares of the work, and
        moves one or several consecutive boundaries as long as the step gets shorter.
        """
        count = self.clock.schedule.num_stages - 1
        if math.comb(len(self.places) - 2, count) <= MAX_EXHAUSTIVE_CUTS:
            every = itertools.combinations(range(1, len(self.places) - 1), count)
            best, _ = self._best(np.array(list(every), np.int64).reshape(-1, count))
        else:
            best = self._searched()
        return [int(self.places[index]) for index in best]

    def _searched(self) -> Cuts:
        """Return the cut at which local search ends."""
        best, score = self._best(self._first())
        actions = SEARCH_ACTIONS
        while True:
            moved = self._moved(best)
            actions -= len(self.clock.order) * (CALL_OVERHEAD_ACTIONS + len(moved))
            if actions <= 0:
                return best
            next_best, next_score = self._best(moved)
            if next_score >= score:
                return best
            best, score = next_best, next_score

    @cached_property
    def places(self) -> Places:
        """The places where a stage may begin, in order, and the end."""
        return np.array([place for place in self.loads.places if place not in self.inside], np.int64)

    @cached_property
    def _cumulative(self) -> dict[Op, Array]:
        """Seconds of each kind of action for all operators before each place."""
        loads = self.loads
        seconds = {
            Op.FORWARD: loads.forward,
            Op.BACKWARD: loads.input + loads.weight,
            Op.BACKWARD_INPUT: loads.input,
            Op.BACKWARD_WEIGHT: loads.weight,
        }
        return {op: seconds[op][self.places] for op in self.clock.ops}

    def _best(self, cuts: Cuts) -> tuple[Cuts, float]:
        """Return the best cut and its score: seconds of a step, and small penalties for uneven stages and for sends."""
        last = len(self.places) - 1
        edges = np.pad(cuts.T, ((1, 1), (0, 0)), constant_values=((0, last), (0, 0)))
        times = {op: np.diff(seconds[edges], axis=0) for op, seconds in self._cumulative.items()}
        work: Array = sum(times.values(), np.zeros(edges.shape)[1:])
        empty = self.loads.empty(self.places[edges[:-1]], self.places[edges[1:]])
        sends = self.loads.sends[:, self.places[edges[1:-1]]]
        seconds = self.clock.seconds(times, sends) + SEND_PENALTY * sends.sum(axis=(0, 1))
        mean = work.mean(axis=0)
        variance = np.divide(work.var(axis=0), mean**2, out=np.zeros_like(mean), where=mean > 0)
        score = seconds * (1 + UNEVEN_PENALTY * variance) + EMPTY_STAGE_SECONDS * empty.sum(axis=0)
        best = int(np.argmin(score))
        return cuts[best], float(score[best])

    def _first(self) -> Cuts:
        """Return the cuts at which the search begins."""
        count = self.clock.schedule.num_stages
        work: Array = sum(self._cumulative.values(), np.zeros(len(self.places)))
        seconds = work[None, :] - work[:, None]
        seconds += EMPTY_STAGE_SECONDS * self.loads.empty(self.places[:, None], self.places[None, :])
        sends = self.loads.sends[:, self.places].sum(axis=0)
        slopes = [1 + slope * (np.arange(count) / (count - 1) - 0.5) for slope in SLOPES]
        even = [balanced_starts(seconds, count), balanced_starts(seconds + sends[:, None], count)]
        return np.array([*even, *(balanced_starts(seconds, count, slope) for slope in slopes)], np.int64)

    def _moved(self, best: Cuts) -> Cuts:
        """Return the cuts in which one boundary moved, or up to four consecutive ones by the same distance."""
        last, count = len(self.places) - 1, len(best)
        edges = [0, *(int(place) for place in best), last]
        cuts = []
        for first in range(1, count + 1):
            for end in range(first, min(first + 4, count + 1)):
                distances = range(1 + edges[first - 1] - edges[first], edges[end + 1] - edges[end])
                if end > first:  # several boundaries move a few places only
                    distances = range(-min(8, -distances.start), min(8, distances.stop - 1) + 1)
                for step in distances:
                    moved = best.copy()
                    moved[first - 1 : end] += step
                    cuts.append(moved)
        return np.array(cuts, np.int64)
