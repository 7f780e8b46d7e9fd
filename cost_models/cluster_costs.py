"""What rank programs cost on a cluster: kernels on its devices, collectives over the links that their ranks cross."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ..core.annotations import is_getitem
from ..core.errors import CompileError, told
from ..core.mesh import Mesh
from ..ir.cost_protocol import RankCosts
from .cluster import Cluster, Group
from .collectives import collective_seconds, lost_seconds
from .kernels import kernel_seconds
from .operators import guessed, kernel_of


@dataclass(frozen=True)
class ClusterCosts:
    """:class:`..ir.cost_protocol.RankCosts` of a cluster of accelerators; ranks are numbered node by node."""

    cluster: Cluster
    unknown: str = "error"
    overlaps: bool = True
    cores: int | None = None
    _groups: dict[Any, Group] = field(default_factory=dict, repr=False, compare=False)

    @property
    def source(self) -> str:
        return f"{self.cluster.gpus_per_node} {self.cluster.device.name} in a node"

    @property
    def action_seconds(self) -> float:
        return 0.0

    def node_seconds(self, node: fx.Node) -> float:
        if node.op != "call_function" or is_getitem(node):
            return 0.0
        return kernel_seconds(kernel_of(node, self.unknown), self.cluster.device)

    def guessed(self, node: fx.Node) -> bool:
        return guessed(node)

    def accumulate_seconds(self, num_bytes: float) -> float:
        return self._traffic(3 * num_bytes)

    def optimizer_seconds(self, num_bytes: float) -> float:
        return self._traffic(7 * num_bytes)

    def _traffic(self, num_bytes: float) -> float:
        device = self.cluster.device
        return device.launch_seconds + num_bytes / (device.memory_bytes_per_second * device.efficiency.memory)

    def _group(self, ranks: tuple[int, ...]) -> Group:
        key = ranks if len(ranks) < 64 else (len(ranks), ranks[:64], ranks[-1])
        if key not in self._groups:
            self._groups[key] = self.cluster.group_of(ranks)
        return self._groups[key]

    def group_seconds(self, name: str, num_bytes: float, ranks: tuple[int, ...]) -> float:
        return collective_seconds(name, self._group(ranks), num_bytes)

    def lost_seconds(self, hidden: float, ranks: tuple[int, ...]) -> float:
        return lost_seconds(hidden, self._group(ranks), self.cluster)

    def send_seconds(self, num_bytes: float, source: int, target: int) -> float:
        return self.group_seconds("send", num_bytes, (source, target))


def costs_of_ranks(given: RankCosts | Cluster | None, mesh: Mesh) -> RankCosts:
    """What a user gives as ``costs`` for the ranks of a mesh; None: nodes of 8 H100.

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
    return ClusterCosts(here, unknown="memory")
