"""Versions, and what the device reaches in a large product and in a copy."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import torch

from .entries import Check, Entry, Figures, NotRun
from .setting import Setting

SIDE, COPY = 8192, 2**30  # of the product; bytes that are copied
SMALL = 256, 2**22  # on the emulated accelerator, which is one core


def run(setting: Setting) -> Iterator[Entry]:
    for what, value in versions(setting).items():
        yield Figures("versions", {"what": what, "value": value})
    side, size = SMALL if setting.emulated else (SIDE, COPY)
    yield from _product(setting, side)
    yield from _copy(setting, size)
    if setting.emulated:
        yield NotRun("ceilings of a GPU", "the emulated accelerator computes with the CPU's kernels")


def versions(setting: Setting) -> dict[str, str]:
    entries = {
        "device": str(setting.device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }
    if setting.cuda:
        properties = torch.cuda.get_device_properties(setting.device)
        entries |= {
            "name": properties.name,
            "compute capability": f"{properties.major}.{properties.minor}",
            "memory, GiB": f"{properties.total_memory / 2**30:.1f}",
            "multiprocessors": str(properties.multi_processor_count),
            "CUDA": str(torch.version.cuda),
            "cuDNN": str(torch.backends.cudnn.version()),
            "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none",
        }
    return entries


def product_rate(setting: Setting, side: int, dtype: torch.dtype) -> float:
    """FLOP/s of square products."""
    a, b = (torch.randn(side, side, device=setting.device).to(dtype) for _ in range(2))
    return float(2 * side**3 / setting.seconds(lambda: a @ b))


def _product(setting: Setting, side: int) -> Iterator[Entry]:
    a, b = (torch.randn(256, 256, dtype=torch.bfloat16) for _ in range(2))
    exact = a.double() @ b.double()
    product = (a.to(setting.device) @ b.to(setting.device)).cpu().double()
    error = float((product - exact).abs().max() / exact.abs().max())
    yield Check("a bf16 product is right to bf16's rounding", error < 2**-7, f"relative error {error:.1e}")
    for dtype in (torch.bfloat16, torch.float32):
        rate = product_rate(setting, side, dtype) / 1e12
        yield Figures("ceilings", {"what": f"{side} x {side} product, {dtype}", "value": rate, "unit": "TFLOP/s"})


def _copy(setting: Setting, size: int) -> Iterator[Entry]:
    x = torch.empty(size, dtype=torch.uint8, device=setting.device)
    y, host = torch.empty_like(x), torch.empty(size, dtype=torch.uint8, pin_memory=setting.cuda)
    for what, moved, work in (
        ("copy on the device, read and written", 2 * size, lambda: y.copy_(x)),
        ("copy to the device, pinned", size, lambda: x.copy_(host, non_blocking=True)),
        ("copy from the device, pinned", size, lambda: host.copy_(x, non_blocking=True)),
    ):
        yield Figures("ceilings", {"what": what, "value": moved / setting.seconds(work) / 1e9, "unit": "GB/s"})
