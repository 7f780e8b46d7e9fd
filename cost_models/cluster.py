"""A cluster: devices in levels of ever slower links, and the links that a group of ranks crosses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..core.errors import CompileError
from .hardware import Hardware
from .hardware_numbers import described


@dataclass(frozen=True)
class Level:
    """All devices within ``span`` neighbours reach each other at ``bytes_per_second`` each, one way. ``network``: over
    adapters, of which every device has its own."""

    name: str
    span: float
    bytes_per_second: float
    seconds: float
    network: bool = False


@dataclass(frozen=True)
class Hop:
    """One level of a group: ``members`` sub-groups meet here, over ``lanes`` devices' adapters side by side."""

    level: Level
    members: int
    lanes: int

    @property
    def bytes_per_second(self) -> float:
        return self.level.bytes_per_second * self.lanes


@dataclass(frozen=True)
class Group:
    """The ranks that take part in a collective, as hops from the innermost level outwards."""

    hops: tuple[Hop, ...]

    @property
    def size(self) -> int:
        return math.prod(hop.members for hop in self.hops)


@dataclass(frozen=True, init=False)
class Cluster:
    """Nodes of one kind of device.

    Args:
        name: of the device, such as ``"h100"`` or ``"h100-pcie"``; or what describes it in numbers, as a mapping or the
            path of a JSON file (see :mod:`.hardware_numbers`).
        nodes: the number of nodes.
        gpus_per_node: devices per node; by default what the device's usual node has.
        network_bytes_per_second: of all adapters of a node together, one way; by default the device's.
        network_seconds: latency of the network; by default the device's.
        rail: how many nodes share the leaf switches.
        oversubscription: how many times slower the level above them is.

    Raises:
        CompileError: QN210 for unknown hardware or a count below 1.

    Examples:
        >>> [level.name for level in Cluster("h100", nodes=8).levels]
        ['NVLink', 'leaf']
    """

    device: Hardware
    nodes: int
    gpus_per_node: int
    levels: tuple[Level, ...]
    rail: int
    oversubscription: float

    def __init__(
        self,
        name: str | Path | Mapping[str, Any] | Hardware,
        nodes: int = 1,
        gpus_per_node: int | None = None,
        *,
        network_bytes_per_second: float | None = None,
        network_seconds: float | None = None,
        rail: int = 32,
        oversubscription: float = 1.0,
    ) -> None:
        device = described(name)
        per_node = gpus_per_node or (4 if device.domain > 8 else device.domain)
        if nodes < 1 or per_node < 1:
            raise CompileError("QN210", f"{nodes} nodes of {per_node}", fix="give whole numbers, 1 or more")
        if network_bytes_per_second is not None:
            device = replace(device, network_bytes_per_second=network_bytes_per_second / per_node)
        if network_seconds is not None:
            device = replace(device, network_seconds=network_seconds)
        share, gpus = device.efficiency, nodes * per_node
        network = device.network_bytes_per_second * share.network
        fast = device.domain if device.domain > 8 else per_node
        levels = [Level(device.link, fast, device.link_bytes_per_second * share.link, device.link_seconds)]
        if device.bridge_bytes_per_second and fast > 1:
            levels.insert(0, Level("bridge", 2, device.bridge_bytes_per_second * share.link, device.link_seconds))
        if gpus > fast:
            leaf = rail * per_node if gpus > rail * per_node else math.inf
            levels.append(Level("leaf", leaf, network, device.network_seconds, True))
            if leaf < gpus:
                levels.append(Level("spine", math.inf, network / oversubscription, 1.3 * device.network_seconds, True))
        object.__setattr__(self, "device", device)
        object.__setattr__(self, "nodes", nodes)
        object.__setattr__(self, "gpus_per_node", per_node)
        object.__setattr__(self, "levels", tuple(levels))
        object.__setattr__(self, "rail", rail)
        object.__setattr__(self, "oversubscription", oversubscription)

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.nodes * self.gpus_per_node

    def has_part(self, devices: float) -> bool:
        """Whether there is such a cluster of so many devices: whole nodes, or a part of one."""
        whole = devices < self.gpus_per_node or devices % self.gpus_per_node == 0
        return whole and devices >= 1 and devices == int(devices)

    def sized(self, devices: int) -> Cluster:
        """The same kind of cluster with so many devices: whole nodes, or a part of one.

        Raises:
            CompileError: QN216 for another number of devices.
        """
        if not self.has_part(devices):
            raise CompileError(
                "QN216", f"{devices} devices are no whole nodes of {self.gpus_per_node}, nor a part of one",
                fix=f"use fewer than {self.gpus_per_node}, or a multiple",
            )  # fmt: skip
        per_node = min(devices, self.gpus_per_node)
        return Cluster(
            self.device, devices // per_node, per_node, rail=self.rail, oversubscription=self.oversubscription
        )

    def group(self, ranks: int, stride: int = 1) -> Group:
        """The levels that ``ranks`` ranks cross whose neighbours are ``stride`` devices apart.

        Raises:
            CompileError: QN301 if the group does not fit the cluster.
        """
        if ranks * stride > self.size:
            raise CompileError(
                "QN301",
                f"a group of {ranks} ranks, {stride} apart, needs {ranks * stride} devices, not {self.size}",
                fix=f"use a cluster of {-(-ranks * stride // self.gpus_per_node)} nodes or a smaller mesh",
            )
        hops: list[Hop] = []
        inside = 1  # how many of the group's members are within the levels so far
        for level in self.levels:
            reach = ranks if math.isinf(level.span) else min(ranks, max(1, int(level.span) // stride))
            if reach > inside:
                hops.append(Hop(level, -(-reach // inside), _lanes(level, hops)))
                inside = reach
        return Group(tuple(hops))

    def group_of(self, ranks: Sequence[int]) -> Group:
        """The levels that these ranks cross, where devices are numbered node by node.

        Examples:
            >>> [hop.members for hop in Cluster("h100", nodes=4).group_of(range(0, 32, 4)).hops]
            [2, 4]

        Raises:
            CompileError: QN301 for a rank that the cluster has no device for.
        """
        if max(ranks) >= self.size:
            raise CompileError(
                "QN301",
                f"rank {max(ranks)} has no device: the cluster has {self.size}",
                fix=f"use a cluster of {-(-(max(ranks) + 1) // self.gpus_per_node)} nodes or more",
            )
        hops: list[Hop] = []
        inside = 1
        for level in self.levels:
            near = Counter(0 if math.isinf(level.span) else rank // int(level.span) for rank in ranks)
            reach = max(near.values())
            if reach > inside:
                hops.append(Hop(level, -(-reach // inside), _lanes(level, hops)))
                inside = reach
        return Group(tuple(hops))

    def axis(self, sizes: Sequence[tuple[str, int]], name: str) -> Group:
        """The group of one axis of a mesh whose axes are given innermost first.

        Raises:
            CompileError: QN201 for an axis that the mesh does not have.
        """
        stride = 1
        for axis, size in sizes:
            if axis == name:
                return self.group(size, stride)
            stride *= size
        raise CompileError("QN201", f"no axis {name!r}", fix=f"use one of {', '.join(a for a, _ in sizes)}")


def _lanes(level: Level, inner: Sequence[Hop]) -> int:
    """A member over the network is all of the group's ranks in one node, each with its own adapter."""
    return math.prod(hop.members for hop in inner if not hop.level.network) if level.network else 1
