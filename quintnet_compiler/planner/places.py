"""Places of a pipeline: the devices of each, their times for the model's units, and the memory that they may use."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from ..core.errors import CompileError
from ..cost_models.cluster import Cluster
from ..cost_models.cluster_costs import ClusterCosts, FastestCosts
from ..cost_models.hardware import Hardware
from ..cost_models.roofline import Roofline
from ..ir.cost_protocol import CostModel, RankCosts
from ..schedules.kinds import looped, there_and_back
from .build import Builder
from .layouts import Layout
from .pipeline import V_SHAPED
from .search import RESERVED_SHARE
from .stage_units import StageUnit

Times = NDArray[np.float64]  # seconds of a microbatch of each unit

HOST_MEMORY_RATIO = 2.5  # host memory over device memory (3.1 in a DGX H100 or A100, 5 in GH200)
FUNCTION_AXES = ("tp", "cp", "ep")  # axes whose collectives are inside functions, as are those of layout.experts


@dataclass(frozen=True)
class Place:
    """One place of a pipeline.

    Attributes:
        units: the model as the ranks of the place run it.
        costs: prices of these ranks.
        devices: their devices, where a cluster has several kinds.
        memory_bytes: what each of them may hold.
        room: the memory of the cluster's largest device over that of the place's smallest.
        alone: for each of several kinds of devices, the share of this place's time that the kind alone would take.
    """

    units: Sequence[StageUnit]
    costs: RankCosts
    devices: str = ""
    memory_bytes: float = math.inf
    room: float = 1.0
    alone: tuple[tuple[str, float], ...] = ()


def placement(layout: Layout) -> tuple[int, ...]:
    """Return the place of each stage."""
    if layout.schedule in V_SHAPED and layout.virtual_stages == 2:
        return there_and_back(layout.pp)
    return looped(layout.pp, layout.virtual_stages)


def are_identical(places: Sequence[Place]) -> bool:
    """Return whether all places are one, with the same prices and memory."""
    return all(place is places[0] for place in places)


def placed(build: Builder, layout: Layout, costs: ClusterCosts, largest: float, share: float) -> Place:
    """Return the place whose ranks have ``costs``; places with equal prices share their units.

    ``largest``: bytes of the cluster's largest device; ``share``: the share of a device's memory that plans may use.

    Raises:
        CompileError: whatever the compiler says of the layout.
    """
    counts = Counter[Hardware]()
    for part in costs.parts:
        counts[part.device] += sum(0 <= rank - part.start < part.count for rank in costs.ranks)
    key = _price_key(layout, costs)
    units = build(layout, costs, key)
    alone = []
    for device in counts if len(counts) > 1 else ():
        units_on_device = build(layout, costs.only(device), (key, device))
        alone.append((device.name, _seconds(units_on_device) / _seconds(units)))
    least = min(device.memory_bytes for device in counts)
    devices = " + ".join(f"{count} x {device.name}" for device, count in counts.items())
    return Place(units, costs, devices, share * least, largest / least, tuple(alone))


def _seconds(units: Sequence[StageUnit]) -> float:
    return sum(unit.forward + unit.backward for unit in units)


def _price_key(layout: Layout, costs: ClusterCosts) -> Hashable:
    """Return what determines the prices of units: devices, and the links of groups within functions."""
    axes = [axis for axis in dict.fromkeys((*FUNCTION_AXES, *layout.experts)) if layout.size(axis) > 1]
    groups = [layout.mesh.peers(0, subset) for subset in _subsets(axes)]
    ends = [(ranks[0], ranks[-1]) for ranks in groups]
    fast = {(part.device, next(iter(part.levels.values()))) for part in costs.parts}
    return frozenset(fast), tuple(frozenset(costs.crossed(ranks)) for ranks in (*groups, *ends))


def _subsets(axes: list[str]) -> Iterator[tuple[str, ...]]:
    for count in range(1, len(axes) + 1):
        yield from combinations(axes, count)


@dataclass(frozen=True)
class Slowdown:
    """A lower bound of the time of a pipeline on unlike devices, however it is cut into stages.

    It is a multiple of the time on hypothetical devices that are as fast as the fastest kind for each operator
    (``fastest``).
    """

    build: Builder
    cluster: Cluster
    fastest: FastestCosts
    cache: dict[Hashable, float] = field(default_factory=dict)

    def fastest_units(self, layout: Layout) -> tuple[StageUnit, ...]:
        """Return the units on the hypothetical devices.

        Raises:
            CompileError: whatever the compiler says of the layout.
        """
        return self.build(layout, self.fastest, "the fastest")

    def __call__(self, layout: Layout, places: int) -> float:
        """Return the factor for the functions of ``layout``, in ``places``.

        Raises:
            CompileError: whatever the compiler says of the layout.
        """
        key = layout.inside, places
        if key not in self.cache:
            fastest = sum(_seconds([unit]) for unit in self.fastest_units(layout))
            times = self._times_of_places(layout, places)
            self.cache[key] = places * fractional_seconds(times) / fastest if fastest else 1.0
        return self.cache[key]

    def _times_of_places(self, layout: Layout, places: int) -> list[Times]:
        """Return seconds of each unit on the slowest device of each place."""
        device_times: dict[Hardware, Times] = {}
        for costs in self.fastest.of:
            device = costs.cluster.device
            times = [_seconds([unit]) for unit in self.build(layout, costs, costs.cluster)]
            device_times[device] = np.minimum(device_times.get(device, np.inf), times)
        size = self.cluster.size // places
        parts = [self.cluster.devices(range(size * place, size * (place + 1))) for place in range(places)]
        return [np.maximum.reduce([device_times[part.device] for part in place]) for place in parts]


@dataclass(frozen=True)
class PricedCluster:
    """A cluster and its prices.

    Attributes:
        cluster: the devices and links.
        unknown: what operators without a price cost, see :func:`..cost_models.operators.kernel_of`.
        reserve: the share of a device's memory that plans leave free, for the CUDA context, libraries and fragments.
        graphs: whether kernels are replayed as CUDA graphs.

    Raises:
        CompileError: QN216 for a reserve that is no share.
    """

    cluster: Cluster
    unknown: str = "error"
    reserve: float = RESERVED_SHARE
    graphs: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.reserve < 1:
            raise CompileError("QN216", f"reserve={self.reserve}", fix="give a share of memory, 0 or more and below 1")

    @property
    def name(self) -> str:
        return self.cluster.name

    @property
    def memory_bytes(self) -> float:
        """Return the memory of the largest device."""
        return max(device.memory_bytes for device, _ in self.cluster.kinds)

    @property
    def host_bytes(self) -> float:
        """Return the host memory for each device of a node."""
        return HOST_MEMORY_RATIO * self.memory_bytes

    @cached_property
    def costs(self) -> ClusterCosts:
        return ClusterCosts(self.cluster, self.unknown, self.graphs)

    @property
    def prices(self) -> CostModel:
        """Return the prices by which shardings are chosen: of the slowest kind, as all ranks run the same program."""
        slowest = min((device for device, _ in self.cluster.kinds), key=lambda device: device.flops_per_second("bf16"))
        return Roofline(slowest, self.unknown)

    @cached_property
    def fastest(self) -> FastestCosts:
        """Return lower bounds of the prices of all kinds of devices."""
        return FastestCosts.of_kinds(self.cluster, self.unknown, self.graphs)

    @property
    def unlike(self) -> bool:
        """Return whether the cluster has parts of several kinds."""
        return len(self.cluster.parts) > 1

    def places(self, build: Builder, layout: Layout) -> list[Place]:
        """Return the places of the layout's pipeline, with the model's units as they run there.

        Raises:
            CompileError: whatever the compiler says of the layout.
        """
        if not self.unlike:
            return [Place(build(layout), self.costs)] * layout.pp
        place_costs = [self.costs.at(layout.mesh, place) for place in range(layout.pp)]
        return [placed(build, layout, costs, self.memory_bytes, 1 - self.reserve) for costs in place_costs]


def fractional_seconds(times: Sequence[Times]) -> float:
    """Return the least time of the slowest place if each unit may be divided between places: a linear program.

    ``times``: seconds of each unit on each place.

    >>> fractional_seconds([np.array([2.0, 2.0]), np.array([1.0, 1.0])])
    1.3333333333333333
    """
    from scipy.optimize import linprog  # imported late, as it takes memory of every rank

    columns, unit_counts = np.unique(np.array(times), axis=1, return_counts=True)  # merge equal units
    rows, place_counts = np.unique(columns, axis=0, return_counts=True)  # merge equal places
    if len(rows) == 1:
        return float((rows[0] * unit_counts).sum() / place_counts[0])
    places, units = rows.shape
    # variables: the amount of each unit on each kind of place, and the time of the slowest place
    amounts = np.hstack([np.tile(np.eye(units), places), np.zeros((units, 1))])
    busy = np.zeros((places, places * units + 1))
    for place, row in enumerate(rows):
        busy[place, place * units : (place + 1) * units] = row
        busy[place, -1] = -place_counts[place]
    goal = np.zeros(places * units + 1)
    goal[-1] = 1
    solution = linprog(goal, busy, np.zeros(places), amounts, unit_counts)
    return float(solution.fun) if solution.fun is not None else 0.0
