"""Hardware constants, each with its source. Adding a device is one constant and one line of ``HARDWARE``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from ..core.absent_gpu import AbsentGpu
from ..core.errors import CompileError

GB, TB, TFLOPS = 1e9, 1e12, 1e12
GIB = 2**30
BYTES_PER_ELEMENT: Mapping[str, float] = MappingProxyType(
    {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "fp4": 0.5}
)


@dataclass(frozen=True)
class Efficiency:
    """What a kind of device reaches of its datasheet: its calibration, the only fitted numbers.

    One set per kind of device, fitted by ``benchmarks/fit_hardware.py``; never one per source or row.

    ``matmul``, ``attention``: share of peak arithmetic reached inside full tiles. ``memory``, ``link``, ``network``:
    share of the datasheet's bandwidth. ``low_precision``: share of the 8-bit and 4-bit peaks, relative to ``matmul``.
    ``host_seconds``: what an eager framework's host spends to launch one kernel. ``contention``: the share of hidden
    communication that computation pays for, in multiprocessors and memory traffic that the transfer takes away, as if
    it ran at the speed of the fast links: over slow ones it lasts longer and takes less.
    """

    matmul: float = 0.75
    attention: float = 0.5
    memory: float = 0.8
    link: float = 0.75
    network: float = 0.75
    low_precision: float = 0.75
    host_seconds: float = 50e-6
    contention: float = 0.2


@dataclass(frozen=True)
class Hardware:
    """One kind of device and its links. Bandwidths are bytes per second in one direction, per device.

    ``flops``: dense multiply-add throughput (2 per pair) per dtype, FLOP/s. ``multiprocessors`` and ``tile``: what
    large products are cut for. ``launch_seconds``: the shortest a kernel takes on the device. ``domain``: how many
    devices share the fast links. ``attention_generation``: the newest FlashAttention made for the device.
    ``network_*``: of one device's share of its node's adapters, unless a cluster says otherwise. ``gpu``: what PyTorch
    chooses kernels by; None for a CPU.
    """

    name: str
    flops: tuple[tuple[str, float], ...]
    memory_bytes: float
    memory_bytes_per_second: float
    link_bytes_per_second: float
    network_bytes_per_second: float
    multiprocessors: int
    tile: tuple[int, int] = (256, 128)
    link_seconds: float = 3.3e-6  # NVLink, 64 bytes (DeepSeek-V3 hardware paper, arXiv 2505.09343, table 5)
    network_seconds: float = 2.8e-6  # InfiniBand under one leaf switch (same table)
    launch_seconds: float = 2.5e-6
    domain: int = 8
    attention_generation: int = 2
    efficiency: Efficiency = Efficiency()
    gpu: AbsentGpu | None = AbsentGpu()

    def flops_per_second(self, dtype: str) -> float:
        """Datasheet throughput; 4-bit and 8-bit products fall back to the next wider type that the device has.

        Raises:
            CompileError: QN210 for a dtype that the device has no number for.
        """
        rates = dict(self.flops)
        for name in {"fp4": ("fp4", "fp8", "bf16"), "fp8": ("fp8", "bf16"), "bf16": ("bf16", "fp16")}.get(
            dtype, (dtype,)
        ):
            if name in rates:
                return rates[name]
        raise CompileError(
            "QN210", f"{self.name} has no throughput for {dtype}", fix=f"use one of {', '.join(sorted(rates))}"
        )


def _rates(
    fp32: float, bf16: float, fp8: float = 0.0, fp4: float = 0.0, tf32: float = 0.0
) -> tuple[tuple[str, float], ...]:
    given = {"fp32": fp32, "tf32": tf32, "fp16": bf16, "bf16": bf16, "fp8": fp8, "fp4": fp4}
    return tuple((dtype, rate * TFLOPS) for dtype, rate in given.items() if rate)


# NVIDIA V100 datasheet: 125 TFLOP/s fp16, 15.7 fp32, 900 GB/s HBM2, NVLink 300 GB/s both ways, 80 SMs.
V100 = Hardware(
    "V100-SXM2-32GB", _rates(15.7, 125), 32 * GIB, 0.9 * TB, 150 * GB, 12.5 * GB, 80, (128, 128),
    attention_generation=1,
    efficiency=Efficiency(matmul=0.58, attention=0.3, memory=0.8, link=0.75, network=0.5, host_seconds=30e-6),
    gpu=AbsentGpu((7, 0), cudnn=False),
)  # fmt: skip
# NVIDIA A100 datasheet: 312 TFLOP/s bf16, 156 tf32, 19.5 fp32; 1555 GB/s (40 GB) and 2039 GB/s (80 GB); NVLink 600
# GB/s both ways; 108 SMs. DGX A100: one HDR 200 Gb/s adapter per GPU.
_AMPERE = AbsentGpu((8, 0), cudnn=False)
_A100 = Efficiency(
    matmul=0.77, attention=0.57, memory=0.67, link=0.70, network=0.72, host_seconds=56e-6, contention=0.65
)
A100_40 = Hardware(
    "A100-SXM-40GB", _rates(19.5, 312, tf32=156), 40 * GIB, 1.555 * TB, 300 * GB, 25 * GB, 108, efficiency=_A100,
    gpu=_AMPERE,
)  # fmt: skip
A100_80 = Hardware(
    "A100-SXM-80GB", _rates(19.5, 312, tf32=156), 80 * GIB, 2.039 * TB, 300 * GB, 25 * GB, 108, efficiency=_A100,
    gpu=_AMPERE,
)  # fmt: skip
# NVIDIA H100 datasheet (SXM5): 989.4 TFLOP/s bf16, 1978.9 fp8, 494.7 tf32, 66.9 fp32; 3.35 TB/s HBM3; NVLink 900 GB/s
# both ways; 132 SMs. DGX H100: one NDR 400 Gb/s adapter per GPU.
_HOPPER = Efficiency(
    matmul=0.69,
    attention=0.56,
    memory=0.47,
    link=0.50,
    network=0.95,
    low_precision=1.0,
    host_seconds=32e-6,
    contention=0.2,
)
H100 = Hardware(
    "H100-SXM-80GB", _rates(66.9, 989.4, 1978.9, tf32=494.7), 80 * GIB, 3.35 * TB, 450 * GB, 50 * GB, 132,
    attention_generation=3, efficiency=_HOPPER,
)  # fmt: skip
# NVIDIA H200 datasheet: the arithmetic of H100; 141 GB of HBM3e at 4.8 TB/s.
H200 = Hardware(
    "H200-SXM-141GB", _rates(66.9, 989.4, 1978.9, tf32=494.7), 141e9, 4.8 * TB, 450 * GB, 50 * GB, 132,
    attention_generation=3, efficiency=_HOPPER,
)  # fmt: skip
# NVIDIA HGX B200 / B300 and GB200 / GB300 NVL72 datasheets, per GPU: dense bf16 2.25 and 2.5 (2.45 is what NVIDIA's
# own utilisation tables divide by) PFLOP/s, fp8 twice and fp4 four times that; 8 TB/s HBM3e; NVLink 1.8 TB/s both ways;
# 148 SMs; 400 Gb/s per GPU (ConnectX-7), 800 with B300 (ConnectX-8).
_BLACKWELL = Efficiency(
    matmul=0.64,
    attention=0.26,
    memory=0.84,
    link=0.57,
    network=0.38,
    low_precision=1.0,
    host_seconds=61e-6,
    contention=0.27,
)
B200 = Hardware(
    "B200-SXM-180GB", _rates(80, 2250, 4500, 9000), 180e9, 8 * TB, 900 * GB, 50 * GB, 148, attention_generation=3,
    efficiency=_BLACKWELL, gpu=AbsentGpu((10, 0)),
)  # fmt: skip
B300 = Hardware(
    "B300-SXM-288GB", _rates(80, 2250, 4500, 13500), 288e9, 8 * TB, 900 * GB, 100 * GB, 148, attention_generation=3,
    efficiency=_BLACKWELL, gpu=AbsentGpu((10, 3)),
)  # fmt: skip
GB200 = Hardware(
    "GB200-NVL72", _rates(80, 2450, 4900, 9800), 186e9, 8 * TB, 900 * GB, 50 * GB, 152, domain=72,
    attention_generation=3, efficiency=_BLACKWELL, gpu=AbsentGpu((10, 0)),
)  # fmt: skip
GB300 = Hardware(
    "GB300-NVL72", _rates(80, 2450, 4900, 14700), 288e9, 8 * TB, 900 * GB, 100 * GB, 152, domain=72,
    attention_generation=3, efficiency=_BLACKWELL, gpu=AbsentGpu((10, 3)),
)  # fmt: skip
# The export parts: A800 is A100 with NVLink at 400 GB/s both ways, H800 is H100 with the same (datasheets; H100's
# 64-bit rate is not used here).
A800 = replace(A100_80, name="A800-SXM-80GB", link_bytes_per_second=200 * GB)
H800 = replace(H100, name="H800-SXM-80GB", link_bytes_per_second=200 * GB)
# AMD Instinct MI300X datasheet: 1307.4 TFLOP/s bf16, 2614.9 fp8, 163.4 fp32; 192 GB at 5.3 TB/s; Infinity Fabric 7
# links of 64 GB/s one way; 304 compute units. 400 Gb/s per GPU is the usual build.
MI300X = Hardware(
    "MI300X-192GB", _rates(163.4, 1307.4, 2614.9), 192e9, 5.3 * TB, 448 * GB, 50 * GB, 304,
    efficiency=Efficiency(matmul=0.5, attention=0.3), gpu=AbsentGpu((9, 4), cudnn=False),
)  # fmt: skip
# One core of an x86 server with AVX2 at about 3 GHz: 2 units x 8 lanes x 2 x 3 GHz; one core's share of memory;
# loopback between processes. A placeholder: `quintnet calibrate` measures the machine at hand.
CPU = Hardware(
    "CPU-core", (("fp32", 96e9), ("bf16", 48e9), ("fp16", 24e9)), 4 * GIB, 12 * GB, 2 * GB, 1 * GB, 1, (16, 16),
    link_seconds=30e-6, network_seconds=60e-6, launch_seconds=3e-6, domain=64, gpu=None,
)  # fmt: skip

HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        "v100": V100, "a100-40": A100_40, "a100": A100_80, "a100-80": A100_80, "a800": A800, "h100": H100,
        "h800": H800, "h200": H200,
        "b200": B200, "b300": B300, "gb200": GB200, "gb300": GB300, "mi300x": MI300X, "cpu": CPU,
    }
)  # fmt: skip


def hardware(name: str) -> Hardware:
    """The hardware called ``name`` (``"h100"``, ``"a100-40"``).

    Raises:
        CompileError: QN210 for a name that is not in ``HARDWARE``.
    """
    if name.lower() not in HARDWARE:
        raise CompileError("QN210", f"unknown hardware {name!r}", fix=f"use one of {', '.join(HARDWARE)}")
    return HARDWARE[name.lower()]
