"""Hardware constants, each with its source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """One accelerator and its link to its neighbours.

    ``flops_per_second``: dense 16-bit matrix throughput, of which ``efficiency`` is usually reached.
    ``memory_bytes_per_second``: device memory. ``link_bytes_per_second``: one direction, to the other ranks of a
    node.
    """

    name: str
    flops_per_second: float
    memory_bytes_per_second: float
    link_bytes_per_second: float
    efficiency: float = 0.6


# NVIDIA H100 Tensor Core GPU datasheet, SXM5: 989.4 TFLOP/s dense bf16, 3.35 TB/s HBM3, NVLink 900 GB/s both
# directions together.
H100 = Hardware("H100-SXM", 989.4e12, 3.35e12, 450e9)
