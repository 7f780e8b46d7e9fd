"""The cost model that the passes use: nodes as kernels, collectives as what leaves a rank over its links."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from ..core.annotations import is_getitem, needs_grad
from .collectives import START_SECONDS, volume
from .hardware import H100, Hardware
from .kernels import work_seconds
from .operators import kernel_of


@dataclass(frozen=True)
class Roofline:
    """Prices for one kind of hardware.

    These compare ways to split the same work, so kernels' floors (but for ``launch_seconds``) and the rounding to tiles
    are left out: every rank pays the floor however an operator is split, and a price must halve when its work does.
    ``unknown="memory"``: operators without a price, which a plan may allow, cost what they read and write.
    """

    hardware: Hardware = H100
    unknown: str = "error"

    def operator_seconds(self, node: fx.Node) -> float:
        if node.op != "call_function" or is_getitem(node):
            return 0.0
        forward = work_seconds(kernel_of(node, self.unknown), self.hardware)
        return forward * (3.0 if needs_grad(node) else 1.0)  # the backward pass of a matmul is two matmuls

    def launch_seconds(self, node: fx.Node) -> float:
        times = 3 if needs_grad(node) else 1
        return times * self.hardware.launch_seconds if self.operator_seconds(node) else 0.0  # views start nothing

    def send_seconds(self, num_bytes: float) -> float:
        hw = self.hardware
        return START_SECONDS + hw.link_seconds + num_bytes / hw.link_bytes_per_second

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
