"""Hardware constants, each with its source. Adding a device is one constant and one line of ``HARDWARE``.

Peaks are dense (without sparsity), with sums in 32 bits, as training has them. Kinds of device without published runs
to fit have the :class:`Efficiency` of the family that is named beside them: not measured. To the host go 16 lanes of
PCIe, of the version that the device has: 3.0 (V100, T4), 4.0 (Ampere, Ada) or 5.0. GH200 has NVLink-C2C, 900 GB/s both
ways for one GPU, GB200 and GB300 the same for two (datasheets); a die of MI250X 36 GB/s one way (Frontier's guide).
Memory of the host is that of two processors for eight devices: 6 channels each of DDR4-2666 beside PCIe 3.0, 8 of
DDR4-3200 beside 4.0, 8 of DDR5-4800 beside 5.0. A Grace with 480 GB has 384 GB/s (NVIDIA's performance tuning guide).
A disk for each device is one of PCIe 4.0 (Samsung PM9A3, 3.84 TB, datasheet: 6.9 GB/s read, 4.1 written): not known.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from ..core.absent_gpu import AbsentGpu
from ..core.errors import CompileError

GB, TB, TFLOPS = 1e9, 1e12, 1e12
PCIE_3, PCIE_4, PCIE_5 = 16 * GB, 32 * GB, 64 * GB  # 16 lanes, one way
DDR4_2666, DDR4_3200, DDR5_4800, GRACE = 32 * GB, 51.2 * GB, 76.8 * GB, 384 * GB  # of the host, for each device
GIB = 2**30
BYTES_PER_ELEMENT: Mapping[str, float] = MappingProxyType(
    {"fp32": 4, "tf32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "fp4": 0.5}
)


@dataclass(frozen=True)
class Efficiency:
    """The shares of its datasheet that a kind of device reaches: its calibration, the only fitted numbers.

    One set per kind of device, fitted by ``benchmarks/fit_hardware.py``; never one per source or row.

    ``matmul``, ``attention``: share of peak arithmetic reached inside full tiles. ``memory``, ``link``, ``network``:
    share of the datasheet's bandwidth; ``host``: of that to the host, for pinned memory, of the host's memory and of
    disks (an assumption; not fitted).
    ``low_precision``: share of the 8-bit and 4-bit peaks, relative to ``matmul``.
    ``host_seconds``: what an eager framework's host spends to launch one kernel. ``contention``: the share of hidden
    communication that computation pays for, in multiprocessors and memory traffic that the transfer takes away, as if
    it ran at the speed of the fast links: over slow ones it lasts longer and takes less.
    """

    matmul: float = 0.75
    attention: float = 0.5
    memory: float = 0.8
    link: float = 0.75
    network: float = 0.75
    host: float = 0.8
    low_precision: float = 0.75
    host_seconds: float = 50e-6
    contention: float = 0.2


@dataclass(frozen=True)
class Hardware:
    """One kind of device and its links. Bandwidths are bytes per second in one direction, per device.

    ``flops``: dense multiply-add throughput (2 per pair) per dtype, FLOP/s. ``multiprocessors`` and ``tile``: what
    large products are cut for. ``launch_seconds``: the shortest a kernel takes on the device. ``domain``: how many
    devices share the fast links. ``host_bytes_per_second``: to the memory of its processor, and from there.
    ``host_memory_bytes_per_second``: its share of what processors read and write. ``disk_read_bytes_per_second``,
    ``disk_write_bytes_per_second``: its share of a node's disks.
    ``attention_generation``: the newest FlashAttention made for the device.
    ``network_*``: of one device's share of its node's adapters, unless a cluster says otherwise. ``gpu``: what PyTorch
    chooses kernels by; None for a CPU. ``link``: what the fast links are. ``bridge_bytes_per_second``: between the two
    devices of a pair, where a bridge joins them and the node's other links are slower. ``watts``: the datasheet's
    largest power of a device (with its processor, where both are one module); 0: not known. ``products``: what its
    driver calls it.
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
    host_bytes_per_second: float = PCIE_5
    host_memory_bytes_per_second: float = DDR5_4800
    disk_read_bytes_per_second: float = 6.9 * GB
    disk_write_bytes_per_second: float = 4.1 * GB
    attention_generation: int = 2
    efficiency: Efficiency = Efficiency()
    gpu: AbsentGpu | None = AbsentGpu()
    link: str = "NVLink"
    bridge_bytes_per_second: float = 0.0
    watts: float = 0.0
    products: tuple[str, ...] = ()

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
    fp32: float, half: float, fp8: float = 0.0, fp4: float = 0.0, tf32: float = 0.0, *, bf16: bool = True
) -> tuple[tuple[str, float], ...]:
    """``bf16``: whether the device computes in it at the rate of fp16; else it does so in 32 bits."""
    rates = {"fp32": fp32, "tf32": tf32, "fp16": half, "bf16": half if bf16 else fp32, "fp8": fp8, "fp4": fp4}
    return tuple((dtype, rate * TFLOPS) for dtype, rate in rates.items() if rate)


# NVIDIA V100 datasheet: 125 TFLOP/s fp16, 15.7 fp32, 900 GB/s HBM2, NVLink 300 GB/s both ways, 80 SMs,
# 300 W. It has no bf16: such products run at the 32-bit rate.
V100 = Hardware(
    "V100-SXM2-32GB", _rates(15.7, 125, bf16=False), 32 * GIB, 0.9 * TB, 150 * GB, 12.5 * GB, 80, (128, 128),
    host_bytes_per_second=PCIE_3, host_memory_bytes_per_second=DDR4_2666, attention_generation=1,
    efficiency=Efficiency(matmul=0.58, attention=0.3, memory=0.8, link=0.75, network=0.5, host_seconds=30e-6),
    gpu=AbsentGpu((7, 0), cudnn=False),
    watts=300, products=("Tesla V100-SXM2-32GB", "Tesla V100-SXM3-32GB"),
)  # fmt: skip
# NVIDIA A100 datasheet: 312 TFLOP/s bf16, 156 tf32, 19.5 fp32; 1555 GB/s (40 GB) and 2039 GB/s (80 GB); NVLink 600
# GB/s both ways; 108 SMs; 400 W. DGX A100: one HDR 200 Gb/s adapter per GPU.
_AMPERE = AbsentGpu((8, 0), cudnn=False)
_A100 = Efficiency(
    matmul=0.73, attention=0.56, memory=0.75, link=0.77, network=0.73, host_seconds=52e-6, contention=0.5
)
A100_40 = Hardware(
    "A100-SXM-40GB", _rates(19.5, 312, tf32=156), 40 * GIB, 1.555 * TB, 300 * GB, 25 * GB, 108, efficiency=_A100,
    host_bytes_per_second=PCIE_4, host_memory_bytes_per_second=DDR4_3200, gpu=_AMPERE,
    watts=400, products=("NVIDIA A100-SXM4-40GB", "A100-SXM4-40GB"),
)  # fmt: skip
A100_80 = Hardware(
    "A100-SXM-80GB", _rates(19.5, 312, tf32=156), 80 * GIB, 2.039 * TB, 300 * GB, 25 * GB, 108, efficiency=_A100,
    host_bytes_per_second=PCIE_4, host_memory_bytes_per_second=DDR4_3200, gpu=_AMPERE,
    watts=400, products=("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
)  # fmt: skip
# NVIDIA H100 datasheet (SXM5): 989.4 TFLOP/s bf16, 1978.9 fp8, 494.7 tf32, 66.9 fp32; 3.35 TB/s HBM3; NVLink 900 GB/s
# both ways; 132 SMs; 700 W. DGX H100: one NDR 400 Gb/s adapter per GPU.
_HOPPER = Efficiency(
    matmul=0.595,
    attention=0.55,
    memory=0.75,
    link=0.72,
    network=0.95,
    low_precision=1.0,
    host_seconds=32e-6,
    contention=0.2,
)
H100 = Hardware(
    "H100-SXM-80GB", _rates(66.9, 989.4, 1978.9, tf32=494.7), 80 * GIB, 3.35 * TB, 450 * GB, 50 * GB, 132,
    attention_generation=3, efficiency=_HOPPER,
    watts=700, products=("NVIDIA H100 80GB HBM3",),
)  # fmt: skip
# NVIDIA H200 datasheet: the arithmetic of H100; 141 GB of HBM3e at 4.8 TB/s.
H200 = Hardware(
    "H200-SXM-141GB", _rates(66.9, 989.4, 1978.9, tf32=494.7), 141e9, 4.8 * TB, 450 * GB, 50 * GB, 132,
    attention_generation=3, efficiency=_HOPPER,
    watts=700, products=("NVIDIA H200",),
)  # fmt: skip
# NVIDIA HGX B200 / B300 and GB200 / GB300 NVL72 datasheets, per GPU: dense bf16 2.25 and 2.5 (2.45 is what NVIDIA's
# own utilisation tables divide by) PFLOP/s, fp8 twice and fp4 four times that; 8 TB/s HBM3e; NVLink 1.8 TB/s both ways;
# 148 SMs; 400 Gb/s per GPU (ConnectX-7), 800 with B300 (ConnectX-8). Up to 1000, 1100, 1200 and 1400 W per GPU.
_BLACKWELL = Efficiency(
    matmul=0.595,
    attention=0.45,
    memory=0.75,
    link=0.58,
    network=0.95,
    low_precision=1.0,
    host_seconds=32e-6,
    contention=0.5,
)
# Blackwell Ultra is another die, with exponentials at twice the rate (NVIDIA, "Inside NVIDIA Blackwell Ultra"), which
# attention on Blackwell waits for (FlashAttention-4), and more power.
_BLACKWELL_ULTRA = replace(_BLACKWELL, matmul=0.64, attention=0.6)
B200 = Hardware(
    "B200-SXM-180GB", _rates(80, 2250, 4500, 9000), 180e9, 8 * TB, 900 * GB, 50 * GB, 148, attention_generation=3,
    efficiency=_BLACKWELL, gpu=AbsentGpu((10, 0)),
    watts=1000, products=("NVIDIA B200",),
)  # fmt: skip
B300 = Hardware(
    "B300-SXM-288GB", _rates(80, 2250, 4500, 13500), 288e9, 8 * TB, 900 * GB, 100 * GB, 148, attention_generation=3,
    efficiency=_BLACKWELL_ULTRA, gpu=AbsentGpu((10, 3)),
    watts=1100, products=("NVIDIA B300 SXM6 AC",),
)  # fmt: skip
GB200 = Hardware(
    "GB200-NVL72", _rates(80, 2450, 4900, 9800), 186e9, 8 * TB, 900 * GB, 50 * GB, 152, domain=72,
    host_bytes_per_second=225 * GB, host_memory_bytes_per_second=GRACE / 2,
    attention_generation=3, efficiency=_BLACKWELL, gpu=AbsentGpu((10, 0)),
    watts=1200, products=("NVIDIA GB200",),
)  # fmt: skip
GB300 = Hardware(
    "GB300-NVL72", _rates(80, 2450, 4900, 14700), 288e9, 8 * TB, 900 * GB, 100 * GB, 152, domain=72,
    host_bytes_per_second=225 * GB, host_memory_bytes_per_second=GRACE / 2,
    attention_generation=3, efficiency=_BLACKWELL_ULTRA, gpu=AbsentGpu((10, 3)),
    watts=1400, products=("NVIDIA GB300",),
)  # fmt: skip
# The export parts: A800 is A100 with NVLink at 400 GB/s both ways, H800 is H100 with the same (datasheets; H100's
# 64-bit rate is not used here).
A800 = replace(A100_80, name="A800-SXM-80GB", link_bytes_per_second=200 * GB, products=("NVIDIA A800-SXM4-80GB",))
H800 = replace(H100, name="H800-SXM-80GB", link_bytes_per_second=200 * GB, products=("NVIDIA H800",))
# AMD Instinct MI300X datasheet: 1307.4 TFLOP/s bf16, 2614.9 fp8, 163.4 fp32; 192 GB at 5.3 TB/s; Infinity Fabric 7
# links of 64 GB/s one way; 304 compute units; 750 W. 400 Gb/s per GPU is the usual build.
MI300X = Hardware(
    "MI300X-192GB", _rates(163.4, 1307.4, 2614.9), 192e9, 5.3 * TB, 448 * GB, 50 * GB, 304,
    efficiency=Efficiency(matmul=0.5, attention=0.3), gpu=AbsentGpu((9, 4), cudnn=False),
    link="Infinity Fabric", watts=750, products=("AMD Instinct MI300X",),
)  # fmt: skip
# MI325X datasheet: the arithmetic and links of MI300X; 256 GB of HBM3E at 6 TB/s, 1000 W.
MI325X = replace(
    MI300X, name="MI325X-256GB", memory_bytes=256e9, memory_bytes_per_second=6 * TB, watts=1000,
    products=("AMD Instinct MI325X",),
)  # fmt: skip
# MI355X datasheet: 2516.6 TFLOP/s bf16, 5033.2 fp8, 10066.3 MXFP4, 157.3 fp32; 288 GB at 8 TB/s; Infinity Fabric 7
# links of 76.8 GB/s one way; 256 compute units; 1400 W. Efficiencies of MI300X.
MI355X = Hardware(
    "MI355X-288GB", _rates(157.3, 2516.6, 5033.2, 10066.3), 288e9, 8 * TB, 537.6 * GB, 50 * GB, 256,
    efficiency=MI300X.efficiency, gpu=AbsentGpu((9, 5), cudnn=False), link="Infinity Fabric", watts=1400,
    products=("AMD Instinct MI355X",),
)  # fmt: skip
# MI250X datasheet, for one of the module's two dies, as PyTorch sees them: half of 383 TFLOP/s bf16, 95.7 fp32
# (matrix), 128 GB, 3.28 TB/s, 220 compute units and 560 W. Frontier's user guide: 200 GB/s between the dies of a
# module, 50 to 100 GB/s to others of the node, and one 200 Gb/s adapter per module. Efficiencies of MI300X.
MI250X = Hardware(
    "MI250X-die-64GB", _rates(47.85, 191.5), 64 * GIB, 1.638 * TB, 50 * GB, 12.5 * GB, 110,
    efficiency=MI300X.efficiency, gpu=AbsentGpu((9, 0), cudnn=False), link="Infinity Fabric",
    bridge_bytes_per_second=200 * GB, host_bytes_per_second=36 * GB, watts=280, products=("AMD Instinct MI250X",),
    host_memory_bytes_per_second=25.6 * GB,  # 8 channels of DDR4-3200 for 8 dies
)  # fmt: skip
# -- PCIe cards: 32 GB/s one way with 16 lanes of PCIe 4.0, 64 with 5.0, 16 with 3.0. Latencies of links are NVLink's:
# not measured. A bridge joins two cards, where the name says so; between all others, everything goes over PCIe.
# NVIDIA H100 PCIe datasheet: 756 TFLOP/s bf16, 1513 fp8, 378 tf32, 51.2 fp32; 2 TB/s HBM2e; NVLink bridge 600 GB/s both
# ways, PCIe 5.0; 114 SMs; 350 W. 200 Gb/s per GPU is NVIDIA's reference server (2-8-5-200). Efficiencies of H100 SXM.
H100_PCIE = replace(
    H100, name="H100-PCIe-80GB", flops=_rates(51.2, 756, 1513, tf32=378), memory_bytes_per_second=2.0 * TB,
    link_bytes_per_second=64 * GB, network_bytes_per_second=25 * GB, multiprocessors=114, link="PCIe", watts=350,
    products=("NVIDIA H100 PCIe",),
)  # fmt: skip
H100_PCIE_BRIDGED = replace(H100_PCIE, bridge_bytes_per_second=300 * GB, products=())
# NVIDIA H100 NVL datasheet: 835.5 TFLOP/s bf16, 1670.5 fp8, 417.5 tf32, 60 fp32; 94 GB of HBM3 at 3.9 TB/s; always two
# with an NVLink bridge of 600 GB/s both ways, PCIe 5.0; 132 SMs; up to 400 W. Efficiencies of H100 SXM.
H100_NVL = replace(
    H100_PCIE_BRIDGED, name="H100-NVL-94GB", flops=_rates(60, 835.5, 1670.5, tf32=417.5), memory_bytes=94e9,
    memory_bytes_per_second=3.9 * TB, multiprocessors=132, watts=400, products=("NVIDIA H100 NVL",),
)  # fmt: skip
# NVIDIA GH200 datasheet: the GPU of H100 SXM with 96 GB of HBM3 at 4 TB/s, or 144 GB of HBM3e at 4.9; NVLink 900 GB/s
# both ways to other modules of a board; one 400 Gb/s adapter each; up to 1000 W with its processor. A node has one.
GH200_96 = replace(
    H100, name="GH200-96GB", memory_bytes=96e9, memory_bytes_per_second=4 * TB, domain=1, watts=1000,
    host_bytes_per_second=450 * GB, host_memory_bytes_per_second=GRACE,
    products=("NVIDIA GH200 480GB",),
)  # fmt: skip
GH200_144 = replace(
    GH200_96, name="GH200-144GB", memory_bytes=144e9, memory_bytes_per_second=4.9 * TB,
    products=("NVIDIA GH200 144G HBM3e",),
)  # fmt: skip
# NVIDIA A100 PCIe datasheet: the arithmetic of A100 SXM; 1555 GB/s and 250 W (40 GB), 1935 GB/s and 300 W (80 GB); PCIe
# 4.0, NVLink bridge 600 GB/s both ways. Efficiencies of A100 SXM.
A100_PCIE_40 = replace(
    A100_40, name="A100-PCIe-40GB", link_bytes_per_second=32 * GB, network_bytes_per_second=12.5 * GB, link="PCIe",
    watts=250, products=("NVIDIA A100-PCIE-40GB",),
)  # fmt: skip
A100_PCIE_80 = replace(
    A100_PCIE_40, name="A100-PCIe-80GB", memory_bytes=80 * GIB, memory_bytes_per_second=1.935 * TB, watts=300,
    products=("NVIDIA A100 80GB PCIe",),
)  # fmt: skip
# NVIDIA A10 datasheet: 125 TFLOP/s bf16, 62.5 tf32, 31.2 fp32; 24 GB at 600 GB/s; PCIe 4.0; 72 SMs; 150 W. A10G
# datasheet (AWS): 70 bf16, 35 tf32, 35 fp32; the same memory; 80 SMs; 300 W; 100 Gb/s for the 8 of g5.48xlarge.
# Efficiencies of A100.
A10 = replace(
    A100_PCIE_40, name="A10-24GB", flops=_rates(31.2, 125, tf32=62.5), memory_bytes=24 * GIB,
    memory_bytes_per_second=600 * GB, multiprocessors=72, watts=150, gpu=AbsentGpu((8, 6), cudnn=False),
    products=("NVIDIA A10",),
)  # fmt: skip
A10G = replace(
    A10, name="A10G-24GB", flops=_rates(35, 70, tf32=35), multiprocessors=80, watts=300,
    network_bytes_per_second=12.5 * GB / 8, products=("NVIDIA A10G",),
)  # fmt: skip
# NVIDIA RTX A6000 datasheet and GA102 whitepaper: 154.8 TFLOP/s bf16, 77.4 tf32, 38.7 fp32; 48 GB at 768 GB/s; PCIe
# 4.0, NVLink bridge 112.5 GB/s both ways; 84 SMs; 300 W. GeForce RTX 3090 (whitepaper): 71, 35.6, 35.6; 24 GB at 936
# GB/s, 82 SMs, 350 W, the same links. Workstations: 10 Gb/s per card, an assumption. Efficiencies of A100.
RTX_A6000 = replace(
    A10, name="RTX-A6000-48GB", flops=_rates(38.7, 154.8, tf32=77.4), memory_bytes=48 * GIB,
    memory_bytes_per_second=768 * GB, multiprocessors=84, watts=300, network_bytes_per_second=1.25 * GB,
    products=("NVIDIA RTX A6000",),
)  # fmt: skip
RTX_A6000_BRIDGED = replace(RTX_A6000, bridge_bytes_per_second=56.25 * GB, products=())
RTX_3090 = replace(
    RTX_A6000, name="RTX-3090-24GB", flops=_rates(35.6, 71, tf32=35.6), memory_bytes=24 * GIB,
    memory_bytes_per_second=936 * GB, multiprocessors=82, watts=350, products=("NVIDIA GeForce RTX 3090",),
)  # fmt: skip
RTX_3090_BRIDGED = replace(RTX_3090, bridge_bytes_per_second=56.25 * GB, products=())
# NVIDIA Ada whitepaper, GeForce RTX 4090: 165.2 TFLOP/s bf16 (sums in 32 bits), 330.3 fp8, 82.6 tf32, 82.6 fp32; 24 GB
# at 1008 GB/s; PCIe 4.0, no NVLink and no peer access: half of PCIe, as all goes through the host's memory; 128 SMs;
# 450 W. Efficiencies of A100, whose way of issuing matrix products Ada has; the same holds for RTX 5090.
RTX_4090 = replace(
    RTX_3090, name="RTX-4090-24GB", flops=_rates(82.6, 165.2, 330.3, tf32=82.6), memory_bytes_per_second=1.008 * TB,
    link_bytes_per_second=16 * GB, multiprocessors=128, watts=450, gpu=AbsentGpu((8, 9), cudnn=False),
    products=("NVIDIA GeForce RTX 4090",),
)  # fmt: skip
# NVIDIA RTX Blackwell whitepaper, GeForce RTX 5090: 209.5 TFLOP/s bf16, 419 fp8 (both with sums in 32 bits), 1676 fp4,
# 104.8 tf32, 104.8 fp32; 32 GB at 1792 GB/s; PCIe 5.0, no NVLink and no peer access; 170 SMs; 575 W.
RTX_5090 = replace(
    RTX_4090, name="RTX-5090-32GB", flops=_rates(104.8, 209.5, 419, 1676, tf32=104.8), memory_bytes=32 * GIB,
    memory_bytes_per_second=1.792 * TB, link_bytes_per_second=32 * GB, host_bytes_per_second=PCIE_5,
    host_memory_bytes_per_second=DDR5_4800, multiprocessors=170, watts=575,
    gpu=AbsentGpu((12, 0), cudnn=False), products=("NVIDIA GeForce RTX 5090",),
)  # fmt: skip
# NVIDIA RTX 6000 Ada datasheet: 364.2 TFLOP/s bf16, 728.5 fp8, 182.1 tf32, 91.1 fp32; 48 GB at 960 GB/s; PCIe 4.0; 142
# SMs; 300 W. L40S datasheet: 362, 733, 183, 91.6; 48 GB at 864 GB/s; 350 W; 200 Gb/s per GPU (2-8-5-200). L4 datasheet:
# 121, 242.5, 60, 30.3; 24 GB at 300 GB/s; 58 SMs; 72 W; 100 Gb/s for the 8 of g6.48xlarge. Efficiencies of A100.
RTX_6000_ADA = replace(
    RTX_4090, name="RTX-6000-Ada-48GB", flops=_rates(91.1, 364.2, 728.5, tf32=182.1), memory_bytes=48 * GIB,
    memory_bytes_per_second=960 * GB, link_bytes_per_second=32 * GB, multiprocessors=142, watts=300,
    products=("NVIDIA RTX 6000 Ada Generation",),
)  # fmt: skip
L40S = replace(
    RTX_6000_ADA, name="L40S-48GB", flops=_rates(91.6, 362, 733, tf32=183), memory_bytes_per_second=864 * GB,
    network_bytes_per_second=25 * GB, watts=350, products=("NVIDIA L40S",),
)  # fmt: skip
L4 = replace(
    L40S, name="L4-24GB", flops=_rates(30.3, 121, 242.5, tf32=60), memory_bytes=24 * GIB,
    memory_bytes_per_second=300 * GB, network_bytes_per_second=12.5 * GB / 8, multiprocessors=58, watts=72,
    products=("NVIDIA L4",),
)  # fmt: skip
# NVIDIA T4 datasheet: 65 TFLOP/s fp16, 8.1 fp32; 16 GB at 320 GB/s; PCIe 3.0; 40 SMs; 70 W; 100 Gb/s for the 8 of
# g4dn.metal. It has no bf16 (such products run at the 32-bit rate). Efficiencies of V100.
T4 = replace(
    V100, name="T4-16GB", flops=_rates(8.1, 65, bf16=False), memory_bytes=16 * GIB, memory_bytes_per_second=320 * GB,
    link_bytes_per_second=16 * GB, network_bytes_per_second=12.5 * GB / 8, multiprocessors=40, link="PCIe", watts=70,
    gpu=AbsentGpu((7, 5), cudnn=False), products=("Tesla T4",),
)  # fmt: skip
# One core of an x86 server with AVX2 at about 3 GHz: 2 units x 8 lanes x 2 x 3 GHz; one core's share of memory;
# loopback between processes. A placeholder: `quintnet calibrate` measures the machine at hand.
CPU = Hardware(
    "CPU-core", (("fp32", 96e9), ("bf16", 48e9), ("fp16", 24e9)), 4 * GIB, 12 * GB, 2 * GB, 1 * GB, 1, (16, 16),
    link_seconds=30e-6, network_seconds=60e-6, launch_seconds=3e-6, domain=64, host_bytes_per_second=5 * GB,
    host_memory_bytes_per_second=12 * GB, gpu=None,
)  # fmt: skip

# A bare name is the part that servers of eight are built with: SXM, with 80 GB where there are two.
HARDWARE: Mapping[str, Hardware] = MappingProxyType(
    {
        "v100": V100, "a100-40": A100_40, "a100": A100_80, "a100-80": A100_80, "a800": A800,
        "a100-pcie-40": A100_PCIE_40, "a100-pcie-80": A100_PCIE_80,
        "h100": H100, "h100-sxm": H100, "h100-pcie": H100_PCIE, "h100-pcie-nvlink": H100_PCIE_BRIDGED,
        "h100-nvl": H100_NVL, "h800": H800, "h200": H200, "gh200-96": GH200_96, "gh200-144": GH200_144,
        "b200": B200, "b300": B300, "gb200": GB200, "gb300": GB300,
        "mi250x": MI250X, "mi300x": MI300X, "mi325x": MI325X, "mi355x": MI355X,
        "t4": T4, "a10": A10, "a10g": A10G, "l4": L4, "l40s": L40S,
        "rtx-3090": RTX_3090, "rtx-3090-nvlink": RTX_3090_BRIDGED, "rtx-4090": RTX_4090, "rtx-5090": RTX_5090,
        "rtx-a6000": RTX_A6000, "rtx-a6000-nvlink": RTX_A6000_BRIDGED, "rtx-6000-ada": RTX_6000_ADA,
        "cpu": CPU,
    }
)  # fmt: skip


def hardware(name: str) -> Hardware:
    """Return the hardware called ``name``.

    This is a name of :data:`HARDWARE` (``"h100"``, ``"a100-40"``), or a product as its driver calls it (``"NVIDIA H100
    PCIe"``, of ``torch.cuda.get_device_name()``); never a part of one.

    Raises:
        CompileError: QN210 for another name, with those that are near.
    """
    device = HARDWARE.get(name.lower().replace(" ", "-").replace("_", "-")) or hardware_by_product(name)
    if device is None:
        raise CompileError("QN210", f"unknown hardware {name!r}", fix=f"use one of {', '.join(_near(name))}")
    return device


def hardware_by_product(name: str) -> Hardware | None:
    """Return the device that its driver calls ``name``; None for any other."""
    return next((device for device in HARDWARE.values() if name.lower() in map(str.lower, device.products)), None)


def _near(name: str) -> list[str]:
    """Return names with every word of ``name``, or with its model number, or spelt alike; or else all."""
    words = name.lower().replace("-", " ").replace("_", " ").split()
    numbers = [word for word in words if not word.isalpha() and not word.endswith("gb")]
    for wanted in (words, numbers):
        if wanted and (names := [key for key in HARDWARE if all(word in key for word in wanted)]):
            return names
    return difflib.get_close_matches(name.lower(), HARDWARE, n=4, cutoff=0.5) or list(HARDWARE)
