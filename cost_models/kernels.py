"""The one mechanism of pricing: a kernel described by numbers -> seconds on a device.

A roofline (Williams, Waterman and Patterson 2009) whose arithmetic side knows how products are cut: into tiles,
in waves over the multiprocessors, with a start-up along the summed dim. Every kernel has a floor.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from .hardware import Hardware

# A tile's share of full speed, relative to the device's own: smaller tiles reuse less of what they load.
TILES = ((1.0, 1, 1), (0.97, 2, 1), (0.97, 1, 2), (0.7, 4, 2))
# Bytes per second at which a multiprocessor's finished tile leaves for the cache, while it multiplies nothing: 64
# multiply-adds along the summed dim on an A100, and more the faster a multiprocessor multiplies.
DRAIN_BYTES_PER_SECOND = 45e9
# 16-bit rows that do not begin at multiples of 16 bytes keep tensor cores from loading them (NVIDIA, "Matrix
# Multiplication Background"): such products run on the ordinary units, at the 32-bit rate.
ALIGNMENT = 8
# Fused attention one generation behind the device: FlashAttention 1 and Triton against 2 on A100 and H100 (Dao 2023,
# figures 4-7), 2 against 3 on H100 (Shah et al. 2024, figures 5-6): between 0.5 and 0.65.
GENERATION = 0.57
# Order of the norm that joins the device's time and the host's. Nearly the expectation of the longer of two normal
# variables that each vary by a fifth of their mean (Clark 1961, "The greatest of a finite set of random variables").
HOST_NORM = 6
Seconds = TypeVar("Seconds", float, NDArray[np.float64])


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launch (or ``launches`` alike) on one device.

    ``flops``: arithmetic, 2 per multiply-add. ``bytes``: read and written in device memory. Products give their
    shape: (``rows`` x ``depth``) @ (``depth`` x ``columns``), ``batch`` times in all launches together. A view has no
    bytes and no launch.
    """

    name: str
    kind: Literal["matmul", "attention", "memory", "view"]
    flops: float = 0.0
    bytes: float = 0.0
    dtype: str = "bf16"
    rows: int = 0
    columns: int = 0
    depth: int = 0
    batch: int = 1
    launches: int = 1
    generation: int = 0  # of fused attention; 0: the device's best


def matmul(
    name: str, rows: float, columns: float, depth: float, *, batch: float = 1, dtype: str = "bf16",
    element: float = 2.0, launches: int = 1,
) -> Kernel:  # fmt: skip
    """Return a product; ``element``: bytes per element of what is read and written."""
    moved = element * batch * (rows * depth + depth * columns + rows * columns)
    return Kernel(
        name, "matmul", 2.0 * batch * rows * columns * depth, moved, dtype,
        math.ceil(rows), math.ceil(columns), math.ceil(depth), math.ceil(batch), launches,
    )  # fmt: skip


def memory(name: str, num_bytes: float, launches: int = 1) -> Kernel:
    """Return elementwise work, a reduction, or a copy: bound by memory traffic."""
    return Kernel(name, "memory", bytes=num_bytes, launches=launches)


def merged_bytes(element: float, steps: float, queries: float, keys_and_values: float, backward: bool) -> float:
    """Return the bytes that a ring reads and writes to add up the results of its steps in 32 bits.

    In each step these are the results of all queries, and backward also the gradients of keys and values, to which
    those that arrive are added.
    """
    return steps * (queries * (8 + element) + (keys_and_values * (24 + element) if backward else 0.0))


def _quantised_flops(kernel: Kernel, device: Hardware) -> float:
    """Return the arithmetic of the busiest multiprocessor, times their number: rounded up to tiles and waves."""
    best, batch = math.inf, kernel.batch / kernel.launches  # one launch ends before the next begins
    drain = device.flops_per_second(kernel.dtype) / device.multiprocessors / DRAIN_BYTES_PER_SECOND
    wide, narrow = device.tile
    for speed, by_wide, by_narrow in TILES:
        across, along = wide // by_wide, narrow // by_narrow
        tiles = math.ceil(kernel.rows / across) * math.ceil(kernel.columns / along) * batch
        # Too few tiles for the device: the summed dim is split too, and the parts are added up.
        parts = max(1, min(device.multiprocessors // tiles, kernel.depth // 512))
        waves = tiles * parts / device.multiprocessors
        waves = max(1.0, 0.5 * (waves + math.ceil(waves)))  # libraries choose tiles, and balance the last wave, well
        depth = kernel.depth / parts + drain * (2 if parts > 1 else 1)
        best = min(best, 2.0 * waves * device.multiprocessors * across * along * depth / speed)
    return best * kernel.launches


def work_seconds(kernel: Kernel, device: Hardware) -> float:
    """Return the time of a kernel's arithmetic and traffic, without the losses of small sizes.

    Smooth in the sizes: no rounding to tiles and no floor. For comparing ways to split an operator.
    """
    moved = kernel.bytes / (device.memory_bytes_per_second * device.efficiency.memory)
    return max(_arithmetic(kernel, device, kernel.flops), moved)


def _arithmetic(kernel: Kernel, device: Hardware, flops: float) -> float:
    if not flops:
        return 0.0
    share = device.efficiency
    behind = max(0, device.attention_generation - kernel.generation) if kernel.generation else 0
    reached = share.attention * GENERATION**behind if kernel.kind == "attention" else share.matmul
    if kernel.columns % ALIGNMENT or kernel.depth % ALIGNMENT:
        return flops / (min(device.flops_per_second("fp32"), device.flops_per_second(kernel.dtype)) * reached)
    if kernel.dtype in ("fp8", "fp4") and kernel.kind == "matmul":
        reached *= share.low_precision
    return flops / (device.flops_per_second(kernel.dtype) * reached)


def kernel_seconds(kernel: Kernel, device: Hardware) -> float:
    """Return the time of ``kernel`` on ``device``, in seconds."""
    if kernel.kind == "view":
        return 0.0
    flops = _quantised_flops(kernel, device) if kernel.kind == "matmul" and kernel.rows else kernel.flops
    moved = kernel.bytes / (device.memory_bytes_per_second * device.efficiency.memory)
    return max(_arithmetic(kernel, device, flops), moved) + device.launch_seconds * kernel.launches


def device_seconds(kernels: Iterable[Kernel], device: Hardware) -> float:
    """Return the time of kernels that run one after another, without that of their launches on the host."""
    return sum(kernel_seconds(kernel, device) for kernel in kernels)


def with_host(device: Seconds, host: Seconds) -> Seconds:
    """Return the seconds of a phase whose kernels take ``device`` seconds, and their launches ``host`` seconds.

    The longer of the two, if one is much longer. Where they are about the same, the host is behind in one moment and
    ahead in the next, so that a phase takes longer than either: by 12% where they are equal.
    """
    both: Seconds = (device**HOST_NORM + host**HOST_NORM) ** (1.0 / HOST_NORM)
    return both
