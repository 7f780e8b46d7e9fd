"""What rank programs cost on a cluster: kernels on its devices, collectives over the links that their ranks cross."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import fx

from ..core.annotations import is_getitem
from ..core.errors import CompileError, describe_value
from ..core.mesh import Mesh
from ..ir.cost_protocol import RankCosts
from .cluster import Cluster
from .collectives import collective_seconds, lost_seconds
from .hardware import Hardware
from .kernels import kernel_seconds
from .links import Group, Part
from .operators import guessed, kernel_of, launches_of


@dataclass(frozen=True)
class ClusterCosts:
    """:class:`..ir.cost_protocol.RankCosts` of a cluster of accelerators; ranks are numbered node by node.

    Of several kinds of nodes, what ranks do together takes as long as on the slowest of their devices, and what they
    send as over the slowest of their links: those of all ranks, or of the ranks of ``mesh`` at a ``place`` of its
    pipeline. ``among``: kinds of devices that count in place of all.
    ``graphs``: kernels are replayed as CUDA graphs, and only messages and sums of gradients are started one by one.
    """

    cluster: Cluster
    unknown: str = "error"
    graphs: bool = False
    overlaps: bool = True
    cores: int | None = None
    mesh: Mesh | None = None
    place: int = 0
    among: tuple[Hardware, ...] = ()
    _groups: dict[Any, tuple[Group, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def source(self) -> str:
        if len(self.cluster.parts) == 1:
            return f"{self.cluster.gpus_per_node} {self.cluster.device.name} in a node"
        return f"{self.cluster.name}; a stage takes as long as on the slowest of its devices"

    @property
    def action_seconds(self) -> float:
        return 0.0

    def at(self, mesh: Mesh, place: int) -> ClusterCosts:
        if len(self.cluster.parts) == 1 or self.mesh is not None:
            return self
        return replace(self, mesh=mesh, place=place)

    def only(self, device: Hardware) -> ClusterCosts:
        """As if all devices were of this kind, where they are."""
        return replace(self, among=(device,))

    @cached_property
    def ranks(self) -> Sequence[int]:
        """Return the ranks whose prices these are."""
        if self.mesh is None:
            return range(self.cluster.size)
        others = [axis for axis in self.mesh.names if axis != "pp"]
        return self.mesh.peers(self.mesh.rank({"pp": self.place}), others)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Return the parts of the cluster in which the ranks lie."""
        return self.cluster.parts if self.mesh is None else self.cluster.devices(self.ranks)

    @cached_property
    def kinds(self) -> tuple[Hardware, ...]:
        """Return the kinds of their devices that count."""
        return self.among or tuple(dict.fromkeys(part.device for part in self.parts))

    def node_seconds(self, node: fx.Node) -> float:
        if node.op != "call_function" or is_getitem(node):
            return 0.0
        kernel = kernel_of(node, self.unknown)
        return max(kernel_seconds(kernel, device) for device in self.kinds)

    def host_seconds(self, node: fx.Node | None) -> float:
        # a core starts what it computes: part of its kernels' shortest time
        each = max(0.0 if device.gpu is None else device.efficiency.host_seconds for device in self.kinds)
        if node is None:
            return each
        if self.graphs or node.op != "call_function" or is_getitem(node):
            return 0.0
        return each * launches_of(node)

    def guessed(self, node: fx.Node) -> bool:
        return guessed(node)

    def accumulate_seconds(self, num_bytes: float) -> float:
        return self._traffic(3 * num_bytes)

    def copy_seconds(self, num_bytes: float) -> float:
        return max(
            device.launch_seconds + num_bytes / (device.host_bytes_per_second * device.efficiency.host)
            for device in self.kinds
        )

    def write_seconds(self, num_bytes: float) -> float:
        return self._through(num_bytes, lambda device: device.disk_write_bytes_per_second)

    def read_seconds(self, num_bytes: float) -> float:
        return self._through(num_bytes, lambda device: device.disk_read_bytes_per_second)

    def _through(self, num_bytes: float, rate: Callable[[Hardware], float]) -> float:
        """Return the time of a transfer through memory of the host: the slower link decides."""
        return max(
            device.launch_seconds
            + num_bytes / (min(device.host_bytes_per_second, rate(device)) * device.efficiency.host)
            for device in self.kinds
        )

    def optimizer_seconds(self, num_bytes: float) -> float:
        return self._traffic(7 * num_bytes)

    def host_update_seconds(self, num_bytes: float) -> float:
        return max(
            7 * num_bytes / (device.host_memory_bytes_per_second * device.efficiency.host) for device in self.kinds
        )

    def _traffic(self, num_bytes: float) -> float:
        return max(
            device.launch_seconds + num_bytes / (device.memory_bytes_per_second * device.efficiency.memory)
            for device in self.kinds
        )

    def crossed(self, ranks: tuple[int, ...]) -> tuple[Group, ...]:
        """Return the links between these ranks; on a mesh, those of every concurrent group of its ranks."""
        key = ranks if len(ranks) < 64 else (len(ranks), ranks[:64], ranks[-1])
        if key not in self._groups:
            offsets = [0] if self.mesh is None else self._offsets(self.mesh, ranks)
            groups = [self.cluster.group_of([rank + offset for rank in ranks]) for offset in offsets]
            self._groups[key] = tuple(dict.fromkeys(groups))
        return self._groups[key]

    def _offsets(self, mesh: Mesh, ranks: tuple[int, ...]) -> list[int]:
        """Return how far from ``ranks`` the groups are that do the same.

        A group within a place of the pipeline may be passed as that of the first place.
        """
        start, end = mesh.coordinate(ranks[0]), mesh.coordinate(ranks[-1])
        same = [axis for axis in mesh.names if start[axis] == end[axis] and axis != "pp"]
        place = {"pp": self.place} if "pp" in mesh.names and start["pp"] == end["pp"] else {}
        first = mesh.rank({**start, **dict.fromkeys(same, 0), **place})
        return [rank - ranks[0] for rank in mesh.peers(first, same)]

    def group_seconds(self, name: str, num_bytes: float, ranks: tuple[int, ...]) -> float:
        return max(collective_seconds(name, group, num_bytes) for group in self.crossed(ranks))

    def lost_seconds(self, hidden: float, ranks: tuple[int, ...]) -> float:
        return max(lost_seconds(hidden, group, self.parts) for group in self.crossed(ranks))

    def send_seconds(self, num_bytes: float, source: int, target: int) -> float:
        return self.group_seconds("send", num_bytes, (source, target))


@dataclass(frozen=True)
class FastestCosts:
    """:class:`..ir.cost_protocol.RankCosts` that take the cheapest of several.

    On a cluster of several kinds of nodes, this is a lower bound, wherever a rank is placed.
    """

    of: tuple[ClusterCosts, ...]

    @classmethod
    def of_kinds(cls, cluster: Cluster, unknown: str, graphs: bool = False) -> FastestCosts:
        """Return prices for each kind, as if all nodes were of that kind."""
        alike = [
            Cluster(part.device, -(-cluster.size // part.per_node), part.per_node, rail=cluster.rail)
            for part in cluster.parts
        ]
        return cls(tuple(ClusterCosts(uniform, unknown, graphs) for uniform in dict.fromkeys(alike)))

    @property
    def source(self) -> str:
        return "the fastest of several kinds"

    @property
    def overlaps(self) -> bool:
        return self.of[0].overlaps

    @property
    def cores(self) -> int | None:
        return None

    @property
    def action_seconds(self) -> float:
        return 0.0

    def _least(self, price: Callable[[ClusterCosts], float]) -> float:
        return min(price(costs) for costs in self.of)

    def at(self, mesh: Mesh, place: int) -> FastestCosts:
        return self

    def node_seconds(self, node: fx.Node) -> float:
        return self._least(lambda one: one.node_seconds(node))

    def host_seconds(self, node: fx.Node | None) -> float:
        return self._least(lambda one: one.host_seconds(node))

    def guessed(self, node: fx.Node) -> bool:
        return self.of[0].guessed(node)

    def accumulate_seconds(self, num_bytes: float) -> float:
        return self._least(lambda one: one.accumulate_seconds(num_bytes))

    def copy_seconds(self, num_bytes: float) -> float:
        return self._least(lambda one: one.copy_seconds(num_bytes))

    def write_seconds(self, num_bytes: float) -> float:
        return self._least(lambda one: one.write_seconds(num_bytes))

    def read_seconds(self, num_bytes: float) -> float:
        return self._least(lambda one: one.read_seconds(num_bytes))

    def optimizer_seconds(self, num_bytes: float) -> float:
        return self._least(lambda one: one.optimizer_seconds(num_bytes))

    def host_update_seconds(self, num_bytes: float) -> float:
        return self._least(lambda one: one.host_update_seconds(num_bytes))

    def group_seconds(self, name: str, num_bytes: float, ranks: tuple[int, ...]) -> float:
        return self._least(lambda one: one.group_seconds(name, num_bytes, ranks))

    def lost_seconds(self, hidden: float, ranks: tuple[int, ...]) -> float:
        return self._least(lambda one: one.lost_seconds(hidden, ranks))

    def send_seconds(self, num_bytes: float, source: int, target: int) -> float:
        return self._least(lambda one: one.send_seconds(num_bytes, source, target))


def costs_of_ranks(costs: RankCosts | Cluster | None, mesh: Mesh, graphs: bool = False) -> RankCosts:
    """Return the prices that a user's ``costs`` stand for, for the ranks of a mesh; None: nodes of 8 H100.

    ``graphs``: see :class:`ClusterCosts`.

    Raises:
        CompileError: QN201 for what is neither a cluster nor prices, QN301 if a cluster has fewer devices than ranks.
    """
    if costs is None:
        costs = Cluster("h100", nodes=-(-mesh.size // 8))
    if not isinstance(costs, Cluster):
        if isinstance(costs, type) or not isinstance(costs, RankCosts):
            raise CompileError(
                "QN201",
                f"costs is {describe_value(costs)}",
                fix='pass costs=quintnet.Cluster("h100"), a calibration, or None',
            )
        return costs
    if costs.size < mesh.size:
        raise CompileError(
            "QN301",
            f"costs is a cluster of {costs.size} devices, and {mesh} has {mesh.size} ranks",
            fix=f"use a cluster of {-(-mesh.size // costs.gpus_per_node)} nodes or more",
        )
    return ClusterCosts(costs, unknown="memory", graphs=graphs)
