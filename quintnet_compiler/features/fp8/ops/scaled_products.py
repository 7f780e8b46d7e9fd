"""Products of 8-bit numbers with scales, as operators.

A tensor ``x`` in 8 bits is a pair: ``x8``, and a ``scale`` for each block of it, so that ``x`` is about ``x8 * scale``.
Blocks are given by their size in each dim, 0 for the whole dim: ``[0, 0]`` is one scale for a matrix (tensorwise),
``[1, 0]`` one for each row (rowwise), ``[1, 32]`` those of the microscaling formats (Rouhani et al. 2023). A scale has
the dims of what it scales, with one index for each block.

    largest = block_max(x, block)               # the largest |x| of each block
    scale = block_scale(largest, float8, ...)   # what makes it the largest number of the format
    x8 = scaled_cast(x, scale, float8)
    y = scaled_matmul(x8, w8, scale, scale_w, "mk,nk->mn", bfloat16)

None of them has a derivative: :mod:`..eight_bits` says what the gradient of a product is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ....compat.torch_codegen import SHIPPED
from ....ops.define import define_operator
from ....ops.extensions import extend
from ....ops.op_spec import Decomposition, OpSpec
from .scaled_kernels import kernel_for, multiply

aten = torch.ops.aten
TINY = 1e-12  # below, a block counts as zeros (as in torchao)
FORWARD, OF_INPUT, OF_WEIGHT = "mk,nk->mn", "mn,nk->mk", "mn,mk->nk"  # m: all leading dims


def blocks_of(size: Sequence[int], block: Sequence[int]) -> list[int]:
    """Return how many blocks a tensor has in each dim.

    >>> blocks_of([6, 64], [0, 32]), blocks_of([6, 64], [1, 0])
    ([1, 2], [6, 1])
    """
    return [-(-n // b) if b else min(n, 1) for n, b in zip(size, block, strict=True)]


def _block_max(x: Tensor, block: Sequence[int]) -> Tensor:
    if not x.numel():
        return x.new_zeros(blocks_of(x.shape, block), dtype=torch.float32)
    for dim, size in enumerate(block):
        if size != 1:
            count = x.shape[dim] // size if size else 1
            x = x.reshape(*x.shape[:dim], count, -1, *x.shape[dim + 1 :])
            x = torch.linalg.vector_norm(x, float("inf"), dim + 1)
    return x.abs().float()


def _block_scale(largest: Tensor, dtype: torch.dtype, power_of_two: bool) -> Tensor:
    """Return scales, computed in float64, so that they are rounded once."""
    scale = largest.double().clamp(min=TINY) / torch.finfo(dtype).max
    return (torch.exp2(torch.log2(scale).ceil()) if power_of_two else scale).float()


def spread(scale: Tensor, size: Sequence[int]) -> Tensor:
    """Return a scale for each number, or for blocks that broadcast."""
    for dim, (have, wanted) in enumerate(zip(scale.shape, size, strict=True)):
        if have not in (1, wanted):
            scale = scale.repeat_interleave(wanted // have, dim)
    return scale


def _scaled_cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return (x / spread(scale, x.shape)).clamp_(-largest, largest).to(dtype)  # at least 32 bits, as scales have


def _cast_in_kernels(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what ``_scaled_cast`` does, to the bit, in operators that compilers fuse with their neighbours.

    An operator that writes in place is a call of its own for them, and a minimum beside a transposed 8-bit store has
    given wrong numbers (triton-lang/triton#11111). NaN is neither larger nor smaller, and passes.
    """
    largest = torch.finfo(dtype).max
    scaled = x / spread(scale, x.shape)
    scaled = SHIPPED.where(scaled > largest, largest, scaled)
    scaled = SHIPPED.where(scaled < -largest, -largest, scaled)
    return scaled.to(dtype)


def _scaled_matmul(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, equation: str, dtype: torch.dtype,
    power_of_two: bool = False,
) -> Tensor:  # fmt: skip
    lead = a.shape[:-1]
    a, scale_a = a.reshape(-1, a.shape[-1]), _rows(scale_a, lead)
    if equation == OF_WEIGHT:
        b, scale_b = b.reshape(-1, b.shape[-1]), _rows(scale_b, lead)
        return scaled_product(a.t(), b, scale_a.t(), scale_b, dtype, power_of_two)
    if equation == FORWARD:
        b, scale_b = b.t(), scale_b.t()
    return scaled_product(a, b, scale_a, scale_b, dtype, power_of_two).reshape(*lead, b.shape[1])


def _rows(scale: Tensor, lead: Sequence[int]) -> Tensor:
    """Return a scale of rows whose leading dims are ``lead``, as that of a matrix."""
    alike = scale.shape[:-1].numel() == 1 or scale.shape[:-2] == tuple(lead[:-1])  # blocks stay of one size
    scales = scale if alike else spread(scale, (*lead, scale.shape[-1]))
    return scales.reshape(-1, scale.shape[-1])


def scaled_product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, power_of_two: bool = False
) -> Tensor:
    """Return ``(a * scale_a) @ (b * scale_b)``.

    On GPUs this is one product of 8-bit numbers where :func:`kernel_for` finds one; else, and on CPUs, what the numbers
    stand for is multiplied. ``power_of_two``: whether all scales are; then this has 16 bits on devices whose matmuls of
    these are fast, and it is no other number.
    """
    kernel = kernel_for(a, b, scale_a, scale_b, dtype, power_of_two)
    if kernel is not None:
        return multiply(a, b, scale_a, scale_b, dtype, kernel)
    exact = power_of_two and dtype is torch.bfloat16 and a.device.type != "cpu"  # has all 8-bit numbers, times these
    wide = dtype if exact else torch.promote_types(dtype, torch.float32)
    left, right = (x.to(wide) * spread(s, x.shape).to(wide) for x, s in ((a, scale_a), (b, scale_b)))
    return (left @ right).to(dtype)


def _of_product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, equation: str, dtype: torch.dtype,
    power_of_two: bool = False,
) -> Tensor:  # fmt: skip
    if equation == OF_WEIGHT:
        return a.new_empty([a.shape[-1], b.shape[-1]], dtype=dtype)
    return a.new_empty([*a.shape[:-1], b.shape[0 if equation == FORWARD else 1]], dtype=dtype)


# of parts that ranks have, the largest is that of all: see :mod:`..scales`
block_max = define_operator(
    "block_max(Tensor x, int[] block) -> Tensor",
    lambda x, block: x.new_empty(blocks_of(x.shape, block), dtype=torch.float32),
    _block_max,
)
block_scale = define_operator(
    "block_scale(Tensor largest, ScalarType dtype, bool power_of_two) -> Tensor",
    lambda largest, dtype, power_of_two: SHIPPED.empty_like(largest, dtype=torch.float32),
    _block_scale,
)
scaled_cast = define_operator(
    "scaled_cast(Tensor x, Tensor scale, ScalarType dtype) -> Tensor",
    lambda x, scale, dtype: x.new_empty(x.shape, dtype=dtype),
    _scaled_cast,
)
scaled_matmul = define_operator(
    "scaled_matmul(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, str equation, ScalarType dtype, "
    "bool power_of_two=False) -> Tensor",
    _of_product,
    _scaled_matmul,
)
# on GPUs, scales and casts, which read a value several times, are fused with the operator before them
extend(block_max, OpSpec(cast_step="largest", consists_of=Decomposition(_block_max, on_gpus=True)))
extend(block_scale, OpSpec(cast_step="scale", consists_of=Decomposition(_block_scale, on_gpus=True)))
extend(scaled_cast, OpSpec(cast_step="cast", consists_of=Decomposition(_cast_in_kernels, on_gpus=True)))
extend(
    scaled_matmul, OpSpec(operand_dtype=True, unpadded=True, consists_of=Decomposition(_scaled_matmul, on_gpus=True))
)
