"""Stage cuts for unlike devices: each stage has as many units as suit the speed and memory of its devices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..cost_models.kernels import with_host
from ..passes.stages.partition import Array, starts_by_prices
from ..schedules.schedule import Op
from .layouts import Layout
from .pipeline import clock, most_at_once
from .places import Place, placement
from .stage_units import StageUnit

Cuts = NDArray[np.int64]  # [k, s]: the unit at which stage s + 1 of cut k begins
State = Callable[[StageUnit, Place], float]  # bytes that a rank of a place holds of a unit for the whole step
BOUNDARY_MOVES = (-3, -2, -1, 1, 2, 3)  # units by which boundaries are moved in a round
MAX_ROUNDS = 20  # of moving boundaries
MAX_CUTS = 1000  # if there are no more cuts, all are tried


def unlike_starts(places: Sequence[Place], layout: Layout, state: State | None = None) -> list[int]:
    """Return the units at which stages 1, 2, ... begin.

    The slowest stage is as fast as it can be; from there boundaries move as long as a step gets shorter. ``state``:
    with it, cuts that exceed the memory of their devices are left out, unless all do.
    """
    search = _CutSearch(places, layout, state)
    starts = search.balanced()
    return search.improved(starts) if starts else starts


class _CutSearch:
    """A search for the fastest cut of units into stages on unlike places."""

    def __init__(self, places: Sequence[Place], layout: Layout, state: State | None) -> None:
        self.layout, self.home = layout, placement(layout)
        self.places = [places[home] for home in self.home]
        self.units = places[0].units
        self.forbidden = [i for i, unit in enumerate(self.units) if i and not unit.begin]
        halves: dict[Op, Callable[[StageUnit], tuple[float, float]]] = {
            Op.FORWARD: lambda unit: (unit.forward, unit.host.forward),
            Op.BACKWARD: lambda unit: (unit.backward, unit.host.input + unit.host.weight),
            Op.BACKWARD_INPUT: lambda unit: (unit.backward - unit.weight, unit.host.input),
            Op.BACKWARD_WEIGHT: lambda unit: (unit.weight, unit.host.weight),
        }
        self.cumulative = {op: self._cumulative(seconds) for op, seconds in halves.items()}
        self.sends = np.array([self._sends(stage) for stage in range(len(self.home) - 1)])
        self.fits = [self._fits(stage, state) for stage in range(len(self.home))] if state else None

    def _cumulative(self, seconds: Callable[[StageUnit], tuple[float, float]]) -> Array:
        """Return seconds [s, k, i] of the first i units on the devices (k = 0) and the host (k = 1) of stage s."""
        sums: Array = np.array([np.cumsum([(0.0, 0.0), *map(seconds, place.units)], axis=0).T for place in self.places])
        return sums

    def _sends(self, stage: int) -> list[float]:
        """Return seconds of sending to the next stage, if that began at each unit."""
        source, target = self.home[stage], self.home[stage + 1]
        if source == target:
            return [0.0] * (len(self.units) + 1)
        mesh, costs = self.layout.mesh, self.places[stage + 1].costs
        ends = mesh.rank({"pp": source}), mesh.rank({"pp": target})
        return [0.0, *(costs.send_seconds(unit.received, *ends) for unit in self.units[1:]), 0.0]

    def _fits(self, stage: int, state: State) -> NDArray[np.bool_]:
        """Return [i, j]: whether a rank has memory for all its stages, if they are as large as units i to j - 1."""
        place, name = self.places[stage], self.layout.schedule
        microbatches = most_at_once(name, self.layout.pp, self.layout.microbatches, self.layout.virtual_stages)[stage]
        size = np.cumsum([0.0, *(state(unit, place) + microbatches * unit.saved for unit in self.units)])
        working = max(unit.working for unit in self.units)
        stages = self.home.count(self.home[stage])
        fits: NDArray[np.bool_] = stages * (size[None, :] - size[:, None]) + working <= place.memory_bytes
        return fits

    def balanced(self) -> list[int]:
        """Return the starts of stages of which the slowest is as fast as it can be."""
        prices = []
        for stage in range(len(self.home)):
            sums = [self.cumulative[op][stage] for op in (Op.FORWARD, Op.BACKWARD)]
            seconds = sum(with_host(*(total[:, None, :] - total[:, :, None])) for total in sums)
            if stage:
                seconds += 2 * self.sends[stage - 1][:, None]
            seconds[self.forbidden] = np.inf
            prices.append(seconds)
        if self.fits is not None:
            fitting = [np.where(fits, price, np.inf) for fits, price in zip(self.fits, prices, strict=True)]
            starts = starts_by_prices(fitting)
            if self._allowed(np.array([starts]))[0]:
                return starts
            self.fits = None
        return starts_by_prices(prices)

    def improved(self, starts: list[int]) -> list[int]:
        """Return the starts of the fastest of all cuts, or of what moving boundaries reaches."""
        count = len(starts)
        if math.comb(len(self.units) - 1 - len(self.forbidden), count) <= MAX_CUTS:
            begins = [i for i in range(1, len(self.units)) if i not in self.forbidden]
            cuts = np.array(list(itertools.combinations(begins, count)), np.int64)
            cuts = cuts[self._allowed(cuts)]
            return [int(start) for start in cuts[int(np.argmin(self._seconds(cuts)))]]
        best, seconds = np.array(starts, np.int64), math.inf
        for _ in range(MAX_ROUNDS):
            cuts = self._moved(best)
            times = self._seconds(cuts)
            first = int(np.argmin(times))
            if times[first] >= seconds * (1 - 1e-9):
                break
            best, seconds = cuts[first], float(times[first])
        return [int(start) for start in best]

    def _moved(self, best: Cuts) -> Cuts:
        """Return the cut itself, and those with consecutive boundaries moved to one side."""
        candidates = [best]
        for first in range(len(best)):
            for last in range(first + 1, len(best) + 1):
                for move in BOUNDARY_MOVES:
                    moved = best.copy()
                    moved[first:last] += move
                    candidates.append(moved)
        cuts = np.array(candidates, np.int64)
        return cuts[self._allowed(cuts)]

    def _edges(self, cuts: Cuts) -> Cuts:
        return np.pad(cuts.T, ((1, 1), (0, 0)), constant_values=((0, len(self.units)), (0, 0)))

    def _allowed(self, cuts: Cuts) -> NDArray[np.bool_]:
        edges = self._edges(cuts)
        wrong = (np.diff(edges, axis=0) <= 0).any(axis=0) | np.isin(cuts, self.forbidden).any(axis=1)
        if self.fits is not None:
            inside = edges.clip(0, len(self.units))
            for stage, fits in enumerate(self.fits):
                wrong |= ~fits[inside[stage], inside[stage + 1]]
        return ~np.asarray(wrong)

    def _seconds(self, cuts: Cuts) -> Array:
        layout, edges = self.layout, self._edges(cuts)
        timing = clock(layout.schedule, layout.pp, layout.microbatches, layout.virtual_stages)
        stages = range(len(self.home))
        times = {}
        for op in timing.ops:
            sums = self.cumulative[op]
            times[op] = np.array([with_host(*(sums[s][:, edges[s + 1]] - sums[s][:, edges[s]])) for s in stages])
        sends = np.array([self.sends[s, edges[s + 1]] for s in stages[:-1]])
        return timing.seconds(times, np.array([sends, sends]))
