"""GPU kernels for products of 8-bit numbers: which a device has, and the layouts that they require.

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

from ....compat.torch_codegen import SHIPPED
from ....ops.define import define_operator

aten = torch.ops.aten
Kernel = Literal["rows", "128", "32"]  # the numbers that share a scale


def kernels_of(device: torch.device) -> frozenset[Kernel]:
    """Return the fp8 kernels that a device has, with the CUDA that torch was built for."""
    if device.type != "cuda":
        return frozenset()
    capability = torch.cuda.get_device_capability(device)
    cuda = tuple(int(part) for part in (torch.version.cuda or "0").split("."))  # ROCm's torch has none
    available: dict[Kernel, bool] = {
        "rows": capability >= (8, 9),
        "128": capability[0] == 9 and cuda >= (12, 9),
        "32": capability >= (10, 0) and cuda >= (12, 8),
    }
    return frozenset(kernel for kernel, supported in available.items() if supported)


def kernel_for(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, power_of_two: bool
) -> Kernel | None:
    """Return the kernel that multiplies ``a`` [M, K] and ``b`` [K, N], with scales of equal blocks in each dim.

    None if there is no such kernel. All take multiples of 16 for K and N, and return 16 bits: bfloat16, or either
    16-bit dtype if there is one scale for each operand.
    """
    available = kernels_of(a.device)
    (rows, depth), columns = a.shape, b.shape[1]
    if not available or not rows or any(size == 0 or size % 16 for size in (depth, columns)):
        return None
    kernel: Kernel | None
    if _scales_whole_rows(scale_a, rows) and _scales_whole_rows(scale_b.t(), columns):
        one_scale = scale_a.numel() == scale_b.numel() == 1
        kernel = "rows" if dtype is torch.bfloat16 or (one_scale and dtype is torch.float16) else None
    elif dtype is torch.bfloat16 and scale_a.shape[1] == scale_b.shape[0]:
        kernel = _block_kernel(a, b, scale_a, scale_b, power_of_two)
    else:
        kernel = None
    return kernel if kernel in available else None


def _scales_whole_rows(scale: Tensor, rows: int) -> bool:
    """Return whether each row of an operand has one scale, or all rows together have one."""
    return scale.shape[1] == 1 and scale.shape[0] in (1, rows)


def _block_kernel(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, power_of_two: bool) -> Kernel | None:
    """Return the kernel for blocks of 128 or 32 numbers of a row, if scales have its form."""
    (rows, depth), columns = a.shape, b.shape[1]
    block = depth / scale_a.shape[1]
    of_rows = scale_a.shape[0] == rows, scale_b.shape[1] == columns
    if block == 128 and rows % 4 == 0:
        square = _in_blocks(rows, scale_a.shape[0]), _in_blocks(columns, scale_b.shape[1])
        fits = any(of_rows) and all(row or tile for row, tile in zip(of_rows, square, strict=True))
        return "128" if fits else None
    return "32" if block == 32 and all(of_rows) and power_of_two else None


def _in_blocks(size: int, parts: int) -> bool:
    return size == 128 * parts or (parts == 1 and size < 128)


def multiply(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, kernel: Kernel) -> Tensor:
    """Return ``(a * scale_a) @ (b * scale_b)``, computed by a kernel of :func:`kernel_for`."""
    if kernel != "rows":
        product: Tensor = block_matmul(a, b, scale_a, scale_b, dtype)
        return product
    if scale_a.numel() > 1 or scale_b.numel() > 1:
        scale_a, scale_b = scale_a.expand(a.shape[0], 1), scale_b.expand(1, b.shape[1])
    rows, columns = (scale.flatten().contiguous() for scale in (scale_a, scale_b))  # kernels check strides
    product = aten._scaled_mm.default(*_with_contiguous_depth(a, b), rows[:, None], columns[None], None, None, dtype)
    return product


def _with_contiguous_depth(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``a`` with contiguous rows and ``b`` with contiguous columns."""
    return a.contiguous(), b.t().contiguous().t()


def _block_matmul(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    pairs = (scale_a, a.shape[0]), (scale_b.t(), b.shape[1])
    if a.shape[1] == 128 * scale_a.shape[1]:
        (left, left_kind), (right, right_kind) = (_scales_of_128(*pair) for pair in pairs)
        return F.scaled_mm(*_with_contiguous_depth(a, b), left, left_kind, right, right_kind, output_dtype=dtype)
    scales = [swizzled(scale.to(torch.float8_e8m0fnu)) for scale, _ in pairs]
    kind, order = ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4
    return F.scaled_mm(
        *_with_contiguous_depth(a, b), scales[0], kind, scales[1], kind, order, order, output_dtype=dtype
    )


def _scales_of_128(scale: Tensor, rows: int) -> tuple[Tensor, ScalingType]:
    """Return scales [R, K / 128] of an operand of ``rows`` rows, in the layout of the kernel.

    Scales of single rows are stored column by column. Scales of 128 x 128 blocks are padded to a multiple of 4 in each
    row, and transposed.
    """
    count, blocks = scale.shape
    if count == rows:
        return scale.new_empty(blocks, count).copy_(scale.t()).t(), ScalingType.BlockWise1x128
    padded = scale.new_zeros(count, -(-blocks // 4) * 4)
    padded[:, :blocks] = scale
    return padded.t(), ScalingType.BlockWise128x128


def swizzled(scale: Tensor) -> Tensor:
    """Return scales [M, K / 32] in the order in which tensor cores read them (SWIZZLE_32_4_4).

    They are padded to tiles of 128 rows and 4 columns, one after the other. The rows of a tile come as 0, 32, 64, 96,
    1, 33, ...
    """
    rows, columns = (-(-n // size) for n, size in zip(scale.shape, (128, 4), strict=True))
    padded = SHIPPED.zeros(rows * 128, columns * 4, dtype=torch.uint8, device=scale.device)
    padded[: scale.shape[0], : scale.shape[1]] = scale.view(torch.uint8)
    tiles = padded.view(rows, 4, 32, columns, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(scale.dtype)


# One operator for compilers: their own lowering of scaled_mm may have been chosen for other scales.
block_matmul = define_operator(
    "block_matmul(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, ScalarType dtype) -> Tensor",
    lambda a, b, scale_a, scale_b, dtype: a.new_empty([a.shape[0], b.shape[1]], dtype=dtype),
    _block_matmul,
)
