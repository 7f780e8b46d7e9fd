"""The cost model that the passes use: nodes as kernels, collectives as what leaves a rank over its links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from ..core.annotations import is_getitem, needs_grad
from ..schedules.synthesis import StageTimes
from .cluster import Cluster
from .collectives import collective_seconds, volume
from .hardware import H100, Hardware
from .kernels import work_seconds
from .links import Group
from .operator_runs import run_seconds, traffic_seconds
from .operators import kernel_of


@dataclass(frozen=True)
class Roofline:
    """Prices for one kind of hardware.

    ``operator_seconds`` compares ways to split the same work, so kernels' floors and the rounding to tiles are left
    out: every rank pays the floor however an operator is split, and a price must halve when its work does.
    ``run_seconds``, which compares ranks that run different operators, has them.
    ``unknown="memory"``: operators without a price, which a plan may allow, cost what they read and write.
    """

    hardware: Hardware = H100
    unknown: str = "error"
    _groups: dict[tuple[int, ...], Group] = field(default_factory=dict, repr=False, compare=False)

    def operator_seconds(self, node: fx.Node) -> float:
        if node.op != "call_function" or is_getitem(node):
            return 0.0
        forward = work_seconds(kernel_of(node, self.unknown), self.hardware)
        return forward * (3.0 if needs_grad(node) else 1.0)  # the backward pass of a matmul is two matmuls

    def run_seconds(self, node: fx.Node, share: float, reads: Sequence[float], writes: float) -> StageTimes:
        return run_seconds(node, share, reads, writes, self.hardware, self.unknown)

    def accumulate_seconds(self, num_bytes: float) -> float:
        return traffic_seconds(3 * num_bytes, self.hardware)

    def send_seconds(self, num_bytes: float, apart: int = 1) -> float:
        return collective_seconds("send", self._group((0, apart)), num_bytes)

    def meeting_seconds(self, name: str, num_bytes: float, ranks: int, apart: int = 1) -> float:
        return collective_seconds(name, self._group(tuple(range(0, ranks * apart, apart))), num_bytes)

    def _group(self, ranks: tuple[int, ...]) -> Group:
        """Return the links between ranks of as many full nodes as they need."""
        if ranks not in self._groups:
            node = Cluster(self.hardware).gpus_per_node
            self._groups[ranks] = Cluster(self.hardware, -(-(max(ranks) + 1) // node)).group_of(ranks)
        return self._groups[ranks]

    def collective_seconds(self, name: str, num_bytes: float, ranks: int) -> float:
        hw = self.hardware
        if name in ("shard_slice", "shard_pad"):  # no communication: read and write one part
            return 2 * num_bytes / ranks / hw.memory_bytes_per_second
        return volume(name, num_bytes, ranks) / hw.link_bytes_per_second

    def mask_seconds(self, num_bytes: float) -> float:
        return 2 * num_bytes / self.hardware.memory_bytes_per_second

    def parameter_seconds(self, num_bytes: float) -> float:
        # AdamW reads gradient, parameter and two moments and writes three of them
        return 7 * num_bytes / self.hardware.memory_bytes_per_second
