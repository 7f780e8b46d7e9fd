"""A cluster: devices in levels of ever slower links, and the links that a group of ranks crosses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from ..core.absent_gpu import AbsentGpu
from ..core.errors import CompileError, describe_value, whole_number
from .hardware import Hardware
from .hardware_numbers import DeviceDescription, described
from .links import Group, Hop, Level, Network, Part, Rung


@dataclass(frozen=True, init=False)
class Cluster:
    """Nodes of one kind of device; of several kinds with :meth:`of`.

    Args:
        name: of the device, such as ``"h100"`` or ``"h100-pcie"``; or what describes it in numbers, as a mapping or the
            path of a JSON file (see :mod:`.hardware_numbers`); or a list with one of these for each device of a node.
        nodes: the number of nodes.
        gpus_per_node: devices per node; by default what the device's usual node has.
        network_bytes_per_second: of all adapters of a node together, one way; by default the devices'.
        network_seconds: latency of the network; by default the devices'.
        rail: how many nodes share the leaf switches.
        oversubscription: how many times slower the level above them is.

    Raises:
        CompileError: QN210 for unknown hardware, a count below 1, or CPUs beside GPUs.

    Examples:
        >>> [level.name for level in Cluster("h100", nodes=8).levels]
        ['NVLink', 'leaf']
        >>> Cluster(["rtx-4090", "rtx-3090"]).name
        '1 x RTX-4090-24GB + 1 x RTX-3090-24GB'
    """

    parts: tuple[Part, ...]
    rail: int
    oversubscription: float

    def __init__(
        self,
        name: DeviceDescription | Sequence[DeviceDescription],
        nodes: int = 1,
        gpus_per_node: int | None = None,
        *,
        network_bytes_per_second: float | None = None,
        network_seconds: float | None = None,
        rail: int = 32,
        oversubscription: float = 1.0,
    ) -> None:
        if isinstance(name, Sequence) and not isinstance(name, str):
            cards = [described(device) for device in name]
            usual = len(cards)
            _require_counts(nodes, usual if gpus_per_node is None else gpus_per_node, by_name=usual)
        else:
            cards = [described(name)]
            usual = 4 if cards[0].domain > 8 else cards[0].domain
            _require_counts(nodes, usual if gpus_per_node is None else gpus_per_node)
        per_node = usual if gpus_per_node is None else gpus_per_node
        if network_bytes_per_second is not None:
            rate = network_bytes_per_second / per_node
            cards = [replace(card, network_bytes_per_second=rate) for card in cards]
        if network_seconds is not None:
            cards = [replace(card, network_seconds=network_seconds) for card in cards]
        self._set_parts(_parts(cards, nodes, per_node), rail, oversubscription)

    def _set_parts(self, unnumbered: Sequence[Part], rail: int, oversubscription: float) -> None:
        """Number the devices and the nodes, and join these with a network."""
        parts, nodes = _numbered(unnumbered)
        if len({part.device.gpu is None for part in parts}) > 1:
            raise CompileError("QN210", f"{_named(parts)}: CPUs beside GPUs", fix="give devices of one of the two")
        blocks = {part.block(Rung.FAST, part.start + place) for part in parts for place in (0, part.count - 1)}
        network = Network(len(blocks) > 1, rail, nodes > rail, oversubscription)
        object.__setattr__(self, "parts", tuple(replace(part, network=network) for part in parts))
        object.__setattr__(self, "rail", rail)
        object.__setattr__(self, "oversubscription", oversubscription)

    @classmethod
    def of(cls, *clusters: Cluster, rail: int = 32, oversubscription: float = 1.0) -> Cluster:
        """Join nodes of several kinds by one network.

        Ranks are numbered node by node, in the order of ``clusters``; messages between two kinds of nodes go at the
        slower one's rate.

        Raises:
            CompileError: QN210 for what is no cluster, for none at all, or for CPUs beside GPUs.

        Examples:
            >>> Cluster.of(Cluster("a100", nodes=2), Cluster("h100")).name
            '16 x A100-SXM-80GB + 8 x H100-SXM-80GB'
        """
        fix = 'pass quintnet.Cluster("h100", nodes=8)'
        for cluster in clusters:
            if not isinstance(cluster, Cluster):
                raise CompileError("QN210", f"{describe_value(cluster)} is no cluster", fix=fix)
        if not clusters:
            raise CompileError("QN210", "a cluster of no nodes", fix=fix)
        joined = object.__new__(cls)
        joined._set_parts([part for cluster in clusters for part in cluster.parts], rail, oversubscription)
        return joined

    @property
    def size(self) -> int:
        """Return the number of devices."""
        return sum(part.count for part in self.parts)

    @property
    def nodes(self) -> int:
        """Return the number of nodes."""
        return sum(part.nodes for part in self.parts if part.begins)

    @property
    def gpus_per_node(self) -> int:
        """Return the devices of each node; of nodes with unlike numbers, the largest number that divides all."""
        counts: Counter[int] = Counter()
        for part in self.parts:
            counts[part.node] += part.per_node
        return math.gcd(*counts.values())

    @cached_property
    def kinds(self) -> tuple[tuple[Hardware, int], ...]:
        """Return the kinds of devices, and the number of each."""
        return _kinds(self.parts)

    @property
    def device(self) -> Hardware:
        """Return the kind of all devices.

        Raises:
            CompileError: QN210 if there are several.
        """
        if len(self.kinds) > 1:
            raise CompileError(
                "QN210", f"{self.name} are several kinds of devices, and this is for one",
                fix="ask for a cluster of each kind",
            )  # fmt: skip
        return self.parts[0].device

    @property
    def levels(self) -> tuple[Level, ...]:
        """Return the links of its devices, the fastest first.

        Raises:
            CompileError: QN210 if there are several kinds of nodes.
        """
        if len(self.parts) > 1:
            raise CompileError(
                "QN210", f"{self.name} have several kinds of nodes, and this is for one",
                fix="ask for a cluster of each kind",
            )  # fmt: skip
        return tuple(self.parts[0].levels.values())

    @property
    def name(self) -> str:
        """Return the number of devices of each kind, as text."""
        return _named(self.parts)

    @cached_property
    def gpu(self) -> AbsentGpu | None:
        """Return the properties by which PyTorch chooses kernels, those that all devices share; None for CPUs."""
        gpus = [device.gpu for device, _ in self.kinds if device.gpu is not None]
        if not gpus:
            return None
        return AbsentGpu(min(gpu.capability for gpu in gpus), all(gpu.cudnn for gpu in gpus))

    def devices(self, ranks: Sequence[int]) -> tuple[Part, ...]:
        """Return the parts in which the devices of these ranks lie."""
        return tuple(part for part in self.parts if any(0 <= rank - part.start < part.count for rank in ranks))

    def has_part(self, devices: float) -> bool:
        """Return whether :meth:`sized` has a cluster of so many devices."""
        if len(self.parts) > 1:
            return devices >= 1 and devices % self.size == 0
        whole = devices < self.gpus_per_node or devices % self.gpus_per_node == 0
        return whole and devices >= 1 and devices == int(devices)

    def sized(self, devices: int) -> Cluster:
        """Return the same kind of cluster with so many devices: whole nodes, or a part of one.

        Of several kinds of nodes, it has all of them so many times.

        Raises:
            CompileError: QN216 for another number of devices.
        """
        if len(self.parts) > 1 and not self.has_part(devices):
            raise CompileError(
                "QN216", f"{devices} devices are not a whole number of times {self.name}",
                fix=f"use a multiple of {self.size}, or ask for another cluster",
            )  # fmt: skip
        if len(self.parts) > 1:
            return self._times(devices // self.size)
        if not self.has_part(devices):
            raise CompileError(
                "QN216", f"{devices} devices are no whole nodes of {self.gpus_per_node}, nor a part of one",
                fix=f"use fewer than {self.gpus_per_node}, or a multiple",
            )  # fmt: skip
        per_node = min(devices, self.gpus_per_node)
        return Cluster(
            self.device, devices // per_node, per_node, rail=self.rail, oversubscription=self.oversubscription
        )

    def _times(self, factor: int) -> Cluster:
        """Return a cluster with so many nodes in place of each, in the same order."""
        runs: list[Part] = []
        for _, group in groupby(self.parts, key=lambda part: part.node):
            node = list(group)
            runs += [replace(node[0], count=factor * node[0].count)] if len(node) == 1 else factor * node
        multiple = object.__new__(type(self))
        multiple._set_parts(runs, self.rail, self.oversubscription)
        return multiple

    def group(self, ranks: int, stride: int = 1) -> Group:
        """Return the levels that ``ranks`` ranks cross whose neighbours are ``stride`` devices apart.

        Raises:
            CompileError: QN301 if the group does not fit the cluster.
        """
        if ranks * stride > self.size:
            raise CompileError(
                "QN301",
                f"a group of {ranks} ranks, {stride} apart, needs {ranks * stride} devices, not {self.size}",
                fix=f"use a cluster of {-(-ranks * stride // self.gpus_per_node)} nodes or a smaller mesh",
            )
        if len(self.parts) > 1:
            return self.group_of(range(0, ranks * stride, stride))
        hops: list[Hop] = []
        inside = 1  # how many of the group's members are within the levels so far
        for level in self.levels:
            reach = ranks if math.isinf(level.span) else min(ranks, max(1, int(level.span) // stride))
            if reach > inside:
                hops.append(Hop(level, -(-reach // inside), _lanes(level, hops)))
                inside = reach
        return Group(tuple(hops))

    def group_of(self, ranks: Sequence[int]) -> Group:
        """Return the levels that these ranks cross, where devices are numbered node by node.

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
        members = [
            (part, rank) for part in self.devices(ranks) for rank in ranks if 0 <= rank - part.start < part.count
        ]
        parts = {part.start: part for part, _ in members}
        hops: list[Hop] = []
        inside = 1  # how many of the group's members are within the levels so far
        for rung in Rung:
            if not (levels := _levels(parts, rung)):
                continue
            near = Counter(part.block(rung, rank) for part, rank in members)
            if max(near.values()) > inside:
                met = {part.start for part, rank in members if near[part.block(rung, rank)] > 1}
                level = _slowest([levels[start] for start in sorted(met)])
                lanes = _adapters(members, levels, level) if level.network else 1
                hops.append(Hop(level, -(-max(near.values()) // inside), lanes))
                inside = max(near.values())
        return Group(tuple(hops))

    def axis(self, sizes: Sequence[tuple[str, int]], name: str) -> Group:
        """Return the group of one axis of a mesh whose axes are given innermost first.

        Raises:
            CompileError: QN201 for an axis that the mesh does not have.
        """
        stride = 1
        for axis, size in sizes:
            if axis == name:
                return self.group(size, stride)
            stride *= size
        raise CompileError("QN201", f"no axis {name!r}", fix=f"use one of {', '.join(a for a, _ in sizes)}")


def _require_counts(nodes: int, per_node: int, by_name: int | None = None) -> None:
    """Require whole numbers, 1 or more; ``by_name``: how many devices of a node were named."""
    if (whole_number(nodes) or 0) < 1 or (whole_number(per_node) or 0) < 1:
        raise CompileError("QN210", f"{nodes} nodes of {per_node}", fix="give whole numbers, 1 or more")
    if by_name is not None and per_node != by_name:
        raise CompileError(
            "QN210", f"gpus_per_node={per_node}, and a node has {by_name} devices by name",
            fix="leave gpus_per_node out",
        )  # fmt: skip


def _parts(cards: Sequence[Hardware], nodes: int, per_node: int) -> list[Part]:
    """Return the parts of equal nodes with these devices (one that stands for all, or each)."""
    runs = [(card, len(list(run))) for card, run in groupby(cards)]
    if len(runs) == 1:
        return [Part(cards[0], nodes * per_node, per_node)]
    return [
        Part(card, count, count, node=node, begins=not turn)
        for node in range(nodes) for turn, (card, count) in enumerate(runs)
    ]  # fmt: skip


def _numbered(unnumbered: Sequence[Part]) -> tuple[list[Part], int]:
    """Return parts with the numbers of their devices and nodes, and the number of nodes.

    Neighbouring parts of one kind become one.
    """
    parts: list[Part] = []
    start = nodes = 0
    for index, part in enumerate(unnumbered):
        alone = part.begins and (index + 1 == len(unnumbered) or unnumbered[index + 1].begins)
        if alone and parts and _continues(parts[-1], part):
            parts[-1] = replace(parts[-1], count=parts[-1].count + part.count)
        else:
            nodes -= 0 if part.begins else 1
            parts.append(replace(part, start=start, node=nodes))
        nodes += part.nodes
        start += part.count
    return parts, nodes


def _continues(last: Part, part: Part) -> bool:
    """Return whether a part is more of the last one, whose nodes and NVLink domains are full."""
    full = last.begins and last.count % last.span == 0
    return full and (last.device, last.per_node) == (part.device, part.per_node)


def _levels(parts: Mapping[int, Part], rung: Rung) -> Mapping[int, Level]:
    """Return the level of each part at ``rung``, by where the part starts.

    Pairs without a bridge, among some that have one, meet over the fast links.
    """
    levels = {start: part.levels[rung] for start, part in parts.items() if rung in part.levels}
    if levels and rung is Rung.BRIDGE:
        return {start: levels.get(start, part.levels[Rung.FAST]) for start, part in parts.items()}
    return levels


def _slowest(levels: Sequence[Level]) -> Level:
    """Return the rate and latency of a ring over all levels."""
    first = min(levels, key=lambda level: level.bytes_per_second)
    return replace(first, seconds=max(level.seconds for level in levels))


def _adapters(members: Sequence[tuple[Part, int]], levels: Mapping[int, Level], slowest: Level) -> float:
    """Return the adapters of a member of a hop over the network, counted in adapters of the slowest kind.

    A member is all of the group's ranks in one node, each with its own adapter; the slowest node counts.
    """
    near: Counter[tuple[int, int]] = Counter()
    rate: dict[tuple[int, int], float] = {}
    for part, rank in members:
        block = part.block(Rung.FAST, rank)
        near[block] += 1
        rate[block] = min(rate.get(block, math.inf), levels[part.start].bytes_per_second)
    return min(count * (rate[block] / slowest.bytes_per_second) for block, count in near.items())


def _lanes(level: Level, inner: Sequence[Hop]) -> float:
    """Return the adapters of a member over the network: all of the group's ranks in one node, each with its own."""
    return math.prod(hop.members for hop in inner if not hop.level.network) if level.network else 1


def _kinds(parts: Sequence[Part]) -> tuple[tuple[Hardware, int], ...]:
    counts: Counter[Hardware] = Counter()
    for part in parts:
        counts[part.device] += part.count
    return tuple(counts.items())


def _named(parts: Sequence[Part]) -> str:
    return " + ".join(f"{count} x {device.name}" for device, count in _kinds(parts))
