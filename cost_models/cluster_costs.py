"""What rank programs cost on a cluster: kernels on its devices, collectives over the links that their ranks cross."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from torch import fx

from ..core.annotations import is_getitem
from ..core.errors import CompileError, told
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
        """Whose prices these are."""
        if self.mesh is None:
            return range(self.cluster.size)
        others = [axis for axis in self.mesh.names if axis != "pp"]
        return self.mesh.peers(self.mesh.rank({"pp": self.place}), others)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Where the ranks lie."""
        return self.cluster.parts if self.mesh is None else self.cluster.devices(self.ranks)

    @cached_property
    def kinds(self) -> tuple[Hardware, ...]:
        """Of their devices: those that count."""
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
        """Through memory of the host: the slower link decides."""
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
        """The links between these ranks; on a mesh, those of every group of its ranks that do the same beside them."""
        key = ranks if len(ranks) < 64 else (len(ranks), ranks[:64], ranks[-1])
        if key not in self._groups:
            away = [0] if self.mesh is None else self._beside(self.mesh, ranks)
            found = [self.cluster.group_of([rank + far for rank in ranks]) for far in away]
            self._groups[key] = tuple(dict.fromkeys(found))
        return self._groups[key]

    def _beside(self, mesh: Mesh, ranks: tuple[int, ...]) -> list[int]:
        """How far from ``ranks`` the groups are that do the same. Groups within a place of the pipeline may be given as
        those of the first."""
        one, other = mesh.coordinate(ranks[0]), mesh.coordinate(ranks[-1])
        same = [axis for axis in mesh.names if one[axis] == other[axis] and axis != "pp"]
        home = {"pp": self.place} if "pp" in mesh.names and one["pp"] == other["pp"] else {}
        first = mesh.rank({**one, **dict.fromkeys(same, 0), **home})
        return [rank - ranks[0] for rank in mesh.peers(first, same)]

    def group_seconds(self, name: str, num_bytes: float, ranks: tuple[int, ...]) -> float:
        return max(collective_seconds(name, group, num_bytes) for group in self.crossed(ranks))

    def lost_seconds(self, hidden: float, ranks: tuple[int, ...]) -> float:
        return max(lost_seconds(hidden, group, self.parts) for group in self.crossed(ranks))

    def send_seconds(self, num_bytes: float, source: int, target: int) -> float:
        return self.group_seconds("send", num_bytes, (source, target))


@dataclass(frozen=True)
class FastestCosts:
    """:class:`..ir.cost_protocol.RankCosts` that take the cheapest of several: on a cluster of several kinds of nodes,
    what nothing undercuts, wherever it lies."""

    of: tuple[ClusterCosts, ...]

    @classmethod
    def of_kinds(cls, cluster: Cluster, unknown: str, graphs: bool = False) -> FastestCosts:
        """As if all nodes were of one of the kinds."""
        size = cluster.size
        alike = [
            Cluster(one.device, -(-size // one.per_node), one.per_node, rail=cluster.rail) for one in cluster.parts
        ]
        return cls(tuple(ClusterCosts(one, unknown, graphs) for one in dict.fromkeys(alike)))

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
        return min(price(one) for one in self.of)

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


def costs_of_ranks(given: RankCosts | Cluster | None, mesh: Mesh, graphs: bool = False) -> RankCosts:
    """What a user gives as ``costs`` for the ranks of a mesh; None: nodes of 8 H100. ``graphs``: as of a cluster's
    :class:`ClusterCosts`.

    Raises:
        CompileError: QN201 for what is neither a cluster nor prices, QN301 if a cluster has fewer devices than ranks.
    """
    here = Cluster("h100", nodes=-(-mesh.size // 8)) if given is None else given
    if not isinstance(here, Cluster):
        if isinstance(here, type) or not isinstance(here, RankCosts):
            raise CompileError(
                "QN201", f"costs is {told(here)}", fix='pass costs=quintnet.Cluster("h100"), a calibration, or None'
            )
        return here
    if here.size < mesh.size:
        raise CompileError(
            "QN301",
            f"costs is a cluster of {here.size} devices, and {mesh} has {mesh.size} ranks",
            fix=f"use a cluster of {-(-mesh.size // here.gpus_per_node)} nodes or more",
        )
    return ClusterCosts(here, unknown="memory", graphs=graphs)
