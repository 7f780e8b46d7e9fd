"""Where stages begin whose devices are unlike: each has as many units as its devices are fast, and as they hold."""

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
FAR = (-3, -2, -1, 1, 2, 3)  # by how many units boundaries are moved
ROUNDS = 20
TRIED = 1000  # up to so many cuts all are tried


def unlike_starts(places: Sequence[Place], layout: Layout, state: State | None = None) -> list[int]:
    """Where stages 1, 2, ... begin: the slowest as fast as it can be, and from there boundaries move as long as a step
    gets shorter. ``state``: stages that take more memory than their devices have are left out; none are if all do."""
    found = _UnlikeCut(places, layout, state)
    starts = found.balanced()
    return found.improved(starts) if starts else starts


class _UnlikeCut:
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
        self.before = {op: self._sums(seconds) for op, seconds in halves.items()}
        self.sends = np.array([self._sends(stage) for stage in range(len(self.home) - 1)])
        self.fits = [self._fits(stage, state) for stage in range(len(self.home))] if state else None

    def _sums(self, seconds: Callable[[StageUnit], tuple[float, float]]) -> Array:
        """``[s, k, i]``: of all units before the i-th, as stage s would run them, on its devices (k = 0) and by the
        host."""
        sums: Array = np.array([np.cumsum([(0.0, 0.0), *map(seconds, place.units)], axis=0).T for place in self.places])
        return sums

    def _sends(self, stage: int) -> list[float]:
        """On the way to the stage behind this one, if that began at each unit."""
        a, b = self.home[stage], self.home[stage + 1]
        if a == b:
            return [0.0] * (len(self.units) + 1)
        mesh, costs = self.layout.mesh, self.places[stage + 1].costs
        ends = mesh.rank({"pp": a}), mesh.rank({"pp": b})
        return [0.0, *(costs.send_seconds(unit.received, *ends) for unit in self.units[1:]), 0.0]

    def _fits(self, stage: int, state: State) -> NDArray[np.bool_]:
        """``[i, j]``: whether a rank has memory for this stage of units ``[i, j)``, and for others like it."""
        place, name = self.places[stage], self.layout.schedule
        held = most_at_once(name, self.layout.pp, self.layout.microbatches, self.layout.virtual_stages)[stage]
        kept = np.cumsum([0.0, *(state(unit, place) + held * unit.saved for unit in self.units)])
        working = max(unit.working for unit in self.units)
        stages = self.home.count(self.home[stage])
        found: NDArray[np.bool_] = stages * (kept[None, :] - kept[:, None]) + working <= place.memory_bytes
        return found

    def balanced(self) -> list[int]:
        work = [self.before[op] for op in (Op.FORWARD, Op.BACKWARD)]
        prices = []
        for stage in range(len(self.home)):
            seconds = sum(with_host(*(one[stage][:, None, :] - one[stage][:, :, None])) for one in work)
            if stage:
                seconds += 2 * self.sends[stage - 1][:, None]
            seconds[self.forbidden] = np.inf
            prices.append(seconds)
        if self.fits is not None:
            held = [np.where(fits, one, np.inf) for fits, one in zip(self.fits, prices, strict=True)]
            starts = starts_by_prices(held)
            if self._allowed(np.array([starts]))[0]:
                return starts
            self.fits = None
        return starts_by_prices(prices)

    def improved(self, starts: list[int]) -> list[int]:
        count = len(starts)
        if math.comb(len(self.units) - 1 - len(self.forbidden), count) <= TRIED:
            begins = [i for i in range(1, len(self.units)) if i not in self.forbidden]
            cuts = np.array(list(itertools.combinations(begins, count)), np.int64)
            cuts = cuts[self._allowed(cuts)]
            return [int(start) for start in cuts[int(np.argmin(self._seconds(cuts)))]]
        best, seconds = np.array(starts, np.int64), math.inf
        for _ in range(ROUNDS):
            cuts = self._moved(best)
            times = self._seconds(cuts)
            first = int(np.argmin(times))
            if times[first] >= seconds * (1 - 1e-9):
                break
            best, seconds = cuts[first], float(times[first])
        return [int(start) for start in best]

    def _moved(self, best: Cuts) -> Cuts:
        """The cut itself, and those with some boundaries that follow each other moved to one side."""
        found = [best]
        for first in range(len(best)):
            for last in range(first + 1, len(best) + 1):
                for far in FAR:
                    moved = best.copy()
                    moved[first:last] += far
                    found.append(moved)
        cuts = np.array(found, np.int64)
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
        times = {
            op: np.array(
                [with_host(*(self.before[op][s][:, edges[s + 1]] - self.before[op][s][:, edges[s]])) for s in stages]
            )
            for op in timing.ops
        }
        sends = np.array([self.sends[s, edges[s + 1]] for s in stages[:-1]])
        return timing.seconds(times, np.array([sends, sends]))
