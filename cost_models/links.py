"""Links of a cluster, from the pair with a bridge to the network's spine, and what a group of ranks crosses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property

from .hardware import Hardware


@dataclass(frozen=True)
class Level:
    """Links over which all devices within ``span`` neighbours reach each other at ``bytes_per_second``, one way.

    ``network``: they are adapters, of which every device has its own.
    """

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
    lanes: float

    @property
    def bytes_per_second(self) -> float:
        """Return the bandwidth of all lanes."""
        return self.level.bytes_per_second * self.lanes


@dataclass(frozen=True)
class Group:
    """The ranks that take part in a collective, as hops from the innermost level outwards."""

    hops: tuple[Hop, ...]

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return math.prod(hop.members for hop in self.hops)


class Rung(IntEnum):
    """The kind of a level: it joins pairs of devices, a node (or a larger NVLink domain), nodes, or switches."""

    BRIDGE = 0
    FAST = 1
    LEAF = 2
    SPINE = 3


@dataclass(frozen=True)
class Network:
    """The network of a whole cluster.

    Attributes:
        far: whether anything crosses it.
        rail: how many nodes share the leaf switches.
        deep: whether there are more nodes.
        oversubscription: how many times slower the level above the leaf switches is.
    """

    far: bool
    rail: int
    deep: bool
    oversubscription: float


@dataclass(frozen=True)
class Part:
    """``count`` neighbouring devices of one kind, ``per_node`` in each node.

    The first is rank ``start``, in node number ``node``; ``begins``: whether it is that node's first device.
    """

    device: Hardware
    count: int
    per_node: int
    start: int = 0
    node: int = 0
    begins: bool = True
    network: Network = field(default=Network(False, 32, False, 1.0))

    @property
    def nodes(self) -> int:
        """Return the number of nodes that it lies in."""
        return -(-self.count // self.per_node)

    @property
    def span(self) -> int:
        """Return the number of devices that the fast links join."""
        return self.device.domain if self.device.domain > 8 else self.per_node

    @cached_property
    def levels(self) -> Mapping[Rung, Level]:
        """Return the links of its devices, the fastest first."""
        device, share, network = self.device, self.device.efficiency, self.network
        rate = device.network_bytes_per_second * share.network
        levels = {
            Rung.FAST: Level(device.link, self.span, device.link_bytes_per_second * share.link, device.link_seconds)
        }
        if device.bridge_bytes_per_second and self.span > 1:
            bridge = Level("bridge", 2, device.bridge_bytes_per_second * share.link, device.link_seconds)
            levels = {Rung.BRIDGE: bridge, **levels}
        if network.far:
            leaf = network.rail * self.per_node if network.deep else math.inf
            levels[Rung.LEAF] = Level("leaf", leaf, rate, device.network_seconds, True)
        if network.deep:
            slower = rate / network.oversubscription
            levels[Rung.SPINE] = Level("spine", math.inf, slower, 1.3 * device.network_seconds, True)
        return levels

    def block(self, rung: Rung, rank: int) -> tuple[int, int]:
        """Return a key of the devices that a level joins; parts in one node share its fast links."""
        local = rank - self.start
        if rung is Rung.BRIDGE:
            return self.start, local // 2
        if rung is Rung.FAST and self.device.domain > 8:
            return self.start, local // self.span
        node = self.node + local // self.per_node
        if rung is Rung.FAST:
            return -1, node
        return (-1, node // self.network.rail) if rung is Rung.LEAF and self.network.deep else (-1, -1)
