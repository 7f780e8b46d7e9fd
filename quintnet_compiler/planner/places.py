"""Where the stages of a layout lie: on each place of its pipeline, how long its devices take for the model's units, and
how many bytes they may hold."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from ..cost_models.cluster import Cluster
from ..cost_models.cluster_costs import ClusterCosts, FastestCosts
from ..cost_models.hardware import Hardware
from ..ir.cost_protocol import RankCosts
from ..schedules.kinds import looped, there_and_back
from .build import Builder
from .layouts import Layout
from .pipeline import V_SHAPED
from .stage_units import StageUnit

Times = NDArray[np.float64]  # seconds of a microbatch of each unit

INSIDE = ("tp", "cp", "ep")  # axes along which ranks meet within functions, and those that experts are spread over


@dataclass(frozen=True)
class Place:
    """One place of a pipeline: the model's ``units`` as its ranks run them, and their prices.

    Where a cluster has several kinds of devices: ``devices``: what the ranks of the place lie on; ``memory_bytes``:
    what each of them may hold; ``room``: how many times as much the largest device of the cluster may; ``alone``: for
    each of several kinds, the share of this place's time in which devices of that kind alone do the same.
    """

    units: Sequence[StageUnit]
    costs: RankCosts
    devices: str = ""
    memory_bytes: float = math.inf
    room: float = 1.0
    alone: tuple[tuple[str, float], ...] = ()


def placement(layout: Layout) -> tuple[int, ...]:
    """The place of each stage."""
    if layout.schedule in V_SHAPED and layout.virtual_stages == 2:
        return there_and_back(layout.pp)
    return looped(layout.pp, layout.virtual_stages)


def alike(places: Sequence[Place]) -> bool:
    """Whether all places have the same prices and memory."""
    return all(place is places[0] for place in places)


def placed(build: Builder, layout: Layout, costs: ClusterCosts, largest: float, share: float) -> Place:
    """``costs``: of the ranks of the place; ``largest``: bytes of the cluster's largest device; ``share``: of the
    memory of a device that plans may use. Places whose ranks take alike have their units in common.

    Raises:
        CompileError: whatever the compiler says of the layout.
    """
    counts = Counter[Hardware]()
    for part in costs.parts:
        counts[part.device] += sum(0 <= rank - part.start < part.count for rank in costs.ranks)
    kind, units = _kind(layout, costs), build(layout, costs, _kind(layout, costs))
    alone = []
    for device in counts if len(counts) > 1 else ():
        there = build(layout, costs.only(device), (kind, device))
        alone.append((device.name, _seconds(there) / _seconds(units)))
    least = min(device.memory_bytes for device in counts)
    devices = " + ".join(f"{count} x {device.name}" for device, count in counts.items())
    return Place(units, costs, devices, share * least, largest / least, tuple(alone))


def _seconds(units: Sequence[StageUnit]) -> float:
    return sum(unit.forward + unit.backward for unit in units)


def _kind(layout: Layout, costs: ClusterCosts) -> Hashable:
    """What tells apart places that price units differently: devices, and the links of groups within functions."""
    axes = [axis for axis in dict.fromkeys((*INSIDE, *layout.experts)) if layout.size(axis) > 1]
    groups = [layout.mesh.peers(0, some) for some in _subsets(axes)]
    ends = [(ranks[0], ranks[-1]) for ranks in groups]
    fast = {(part.device, next(iter(part.levels.values()))) for part in costs.parts}
    return frozenset(fast), tuple(frozenset(costs.crossed(ranks)) for ranks in (*groups, *ends))


def _subsets(axes: list[str]) -> Iterator[tuple[str, ...]]:
    for count in range(1, len(axes) + 1):
        yield from combinations(axes, count)


@dataclass(frozen=True)
class Slowdown:
    """How many times as long a pipeline takes whose places lie in ``cluster`` as one that is as fast everywhere as any
    kind of device is (``fastest``), at least: however blocks are cut."""

    build: Builder
    cluster: Cluster
    fastest: FastestCosts
    known: dict[Hashable, float] = field(default_factory=dict)

    def least(self, layout: Layout) -> tuple[StageUnit, ...]:
        """The model as nothing undercuts it.

        Raises:
            CompileError: whatever the compiler says of the layout.
        """
        return self.build(layout, self.fastest, "the fastest")

    def __call__(self, layout: Layout, places: int) -> float:
        """Of the functions of ``layout``, in so many places.

        Raises:
            CompileError: whatever the compiler says of the layout.
        """
        key = layout.inside, places
        if key not in self.known:
            least = [_seconds([unit]) for unit in self.least(layout)]
            alike: dict[Hardware, Times] = {}
            for one in self.fastest.of:
                times = [_seconds([unit]) for unit in self.build(layout, one, one.cluster)]
                alike[one.cluster.device] = np.minimum(alike.get(one.cluster.device, np.inf), times)
            each = self.cluster.size // places
            parts = [self.cluster.devices(range(each * place, each * (place + 1))) for place in range(places)]
            found = [np.maximum.reduce([alike[part.device] for part in some]) for some in parts]
            self.known[key] = places * fractional_seconds(found) / sum(least) if sum(least) else 1.0
        return self.known[key]


def fractional_seconds(times: Sequence[Times]) -> float:
    """The least time of the slowest of several places if units are divided between them, each in any parts: a linear
    program. ``times``: of each place, seconds of each unit.

    >>> fractional_seconds([np.array([2.0, 2.0]), np.array([1.0, 1.0])])
    1.3333333333333333
    """
    from scipy.optimize import linprog  # here: it takes memory of every rank

    columns, counts = np.unique(np.array(times), axis=1, return_counts=True)  # blocks that are alike are one
    rows, often = np.unique(columns, axis=0, return_counts=True)  # and so are places
    if len(rows) == 1:
        return float((rows[0] * counts).sum() / often[0])
    places, units = rows.shape
    # how much of each unit each kind of place has, and the time of the slowest
    whole = np.hstack([np.tile(np.eye(units), places), np.zeros((units, 1))])
    busy = np.zeros((places, places * units + 1))
    for place, one in enumerate(rows):
        busy[place, place * units : (place + 1) * units] = one
        busy[place, -1] = -often[place]
    goal = np.zeros(places * units + 1)
    goal[-1] = 1
    found = linprog(goal, busy, np.zeros(places), whole, counts)
    return float(found.fun) if found.fun is not None else 0.0
