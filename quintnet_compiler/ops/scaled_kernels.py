"""Kernels of GPUs for products of 8-bit numbers: which there are, and how they want operands and scales to lie.

Of scales of whole rows and columns, ``torch._scaled_mm``. Of blocks, :func:`torch.nn.functional.scaled_mm`: 128 numbers
of a row, of which one operand may have 128 x 128 (NVIDIA Hopper, cuBLAS 12.9), or 32 with scales that are powers of two
(Blackwell). Sources: the cuBLAS manual on block scaling, and ``ScaledBlas.cpp`` of PyTorch 2.11 to 2.13.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from .define import define_operator

aten = torch.ops.aten
Kernel = Literal["rows", "128", "32"]  # what has a scale


def kernels_of(device: torch.device) -> frozenset[Kernel]:
    """The kernels of 8-bit floating-point numbers that a device has, with the CUDA that torch was built for."""
    if device.type != "cuda":
        return frozenset()
    capability = torch.cuda.get_device_capability(device)
    cuda = tuple(int(part) for part in (torch.version.cuda or "0").split("."))  # ROCm's torch has none
    found: dict[Kernel, bool] = {
        "rows": capability >= (8, 9),
        "128": capability[0] == 9 and cuda >= (12, 9),
        "32": capability >= (10, 0) and cuda >= (12, 8),
    }
    return frozenset(name for name, there in found.items() if there)


def kernel_for(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, power_of_two: bool
) -> Kernel | None:
    """The kernel that multiplies ``a`` [M, K] and ``b`` [K, N] with scales of blocks that are alike in each dim; None
    if no such is there. All take multiples of 16 for K and N, and make 16 bits: bfloat16, or either if there is one
    scale for each operand."""
    there = kernels_of(a.device)
    (m, k), n = a.shape, b.shape[1]
    if not there or not m or any(size == 0 or size % 16 for size in (k, n)):
        return None
    if scale_a.shape[1] == scale_b.shape[0] == 1 and scale_a.shape[0] in (1, m) and scale_b.shape[1] in (1, n):
        one = scale_a.numel() == scale_b.numel() == 1
        right = dtype is torch.bfloat16 or (one and dtype is torch.float16)
        return "rows" if right and "rows" in there else None
    if dtype is not torch.bfloat16 or scale_a.shape[1] != scale_b.shape[0]:
        return None
    along = k / scale_a.shape[1]
    single = scale_a.shape[0] == m, scale_b.shape[1] == n
    if along == 128 and "128" in there and m % 4 == 0:
        square = _in_blocks(m, scale_a.shape[0]), _in_blocks(n, scale_b.shape[1])
        return "128" if any(single) and all(one or two for one, two in zip(single, square, strict=True)) else None
    return "32" if along == 32 and all(single) and power_of_two and "32" in there else None


def _in_blocks(size: int, parts: int) -> bool:
    return size == 128 * parts or (parts == 1 and size < 128)


def multiply(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, kernel: Kernel) -> Tensor:
    """``(a * scale_a) @ (b * scale_b)`` by a kernel that :func:`kernel_for` found."""
    if kernel != "rows":
        found: Tensor = block_matmul(a, b, scale_a, scale_b, dtype)
        return found
    if scale_a.numel() > 1 or scale_b.numel() > 1:
        scale_a, scale_b = scale_a.expand(a.shape[0], 1), scale_b.expand(1, b.shape[1])
    rows, columns = (scale.flatten().contiguous() for scale in (scale_a, scale_b))  # with strides of what lies together
    made: Tensor = aten._scaled_mm.default(*_laid_out(a, b), rows[:, None], columns[None], None, None, dtype)
    return made


def _laid_out(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of ``a`` and the columns of ``b`` are what lies together."""
    return a.contiguous(), b.t().contiguous().t()


def _block_matmul(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    pairs = (scale_a, a.shape[0]), (scale_b.t(), b.shape[1])
    if a.shape[1] == 128 * scale_a.shape[1]:
        (one, kind), (other, other_kind) = (_scales_of_128(*pair) for pair in pairs)
        return F.scaled_mm(*_laid_out(a, b), one, kind, other, other_kind, output_dtype=dtype)
    scales = [swizzled(scale.to(torch.float8_e8m0fnu)) for scale, _ in pairs]
    kind, order = ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4
    return F.scaled_mm(*_laid_out(a, b), scales[0], kind, scales[1], kind, order, order, output_dtype=dtype)


def _scales_of_128(scale: Tensor, rows: int) -> tuple[Tensor, ScalingType]:
    """Scales [R, K / 128] of an operand of so many ``rows``. One for each row lies column by column; of 128 x 128, each
    row is filled up to a multiple of 4 and is a column of what the kernel takes."""
    count, along = scale.shape
    if count == rows:
        return scale.new_empty(along, count).copy_(scale.t()).t(), ScalingType.BlockWise1x128
    room = scale.new_zeros(count, -(-along // 4) * 4)
    room[:, :along] = scale
    return room.t(), ScalingType.BlockWise128x128


def swizzled(scale: Tensor) -> Tensor:
    """Scales [M, K / 32] in the order in which tensor cores read them: tiles of 128 rows and 4 columns one after the
    other, filled up, and in each tile the rows 0, 32, 64, 96, 1, 33, ... (SWIZZLE_32_4_4)."""
    rows, columns = (-(-n // size) for n, size in zip(scale.shape, (128, 4), strict=True))
    room = torch.zeros(rows * 128, columns * 4, dtype=torch.uint8, device=scale.device)
    room[: scale.shape[0], : scale.shape[1]] = scale.view(torch.uint8)
    tiles = room.view(rows, 4, 32, columns, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(scale.dtype)


# One call where a compiler makes kernels: what it makes of scaled_mm itself, it may choose for other scales.
block_matmul = define_operator(
    "block_matmul(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, ScalarType dtype) -> Tensor",
    lambda a, b, scale_a, scale_b, dtype: a.new_empty([a.shape[0], b.shape[1]], dtype=dtype),
    _block_matmul,
)
