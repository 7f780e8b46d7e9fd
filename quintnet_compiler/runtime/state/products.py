"""Products of two matrices that are terms of a gradient, added up where they are computed."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compat.torch import has_kernel

aten = torch.ops.aten
NARROW = (torch.float16, torch.bfloat16)
_WIDE = [getattr(packet, "dtype_out", None) for packet in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)]


def adds_up(slot: Tensor, factor: Tensor) -> bool:
    """Whether a kernel adds products of matrices like ``factor`` to ``slot``: of one dtype, or of 16 bits to float32,
    which CUDA has and CPUs have not."""
    if factor.dtype is slot.dtype:
        return True
    if factor.dtype not in NARROW or slot.dtype is not torch.float32 or slot.is_meta:
        return False
    return all(op is not None and has_kernel(op, slot.device) for op in _WIDE)


def put_product(slot: Tensor, left: Tensor, right: Tensor) -> None:
    """``slot`` becomes ``left @ right``, of matrices or of batches of them. Products of 16-bit factors are summed in
    float32 and not rounded before they are in ``slot``."""
    if left.dtype is slot.dtype:
        (torch.mm if slot.dim() == 2 else torch.bmm)(left, right, out=slot)
    elif slot.dim() == 2:
        aten.mm.dtype_out(left, right, slot.dtype, out=slot)
    else:
        aten.bmm.dtype_out(left, right, slot.dtype, out=slot)


def add_product(slot: Tensor, left: Tensor, right: Tensor) -> None:
    """The same, added to what ``slot`` has."""
    if left.dtype is slot.dtype:
        (slot.addmm_ if slot.dim() == 2 else slot.baddbmm_)(left, right)
    elif slot.dim() == 2:
        aten.addmm.dtype_out(slot, left, right, slot.dtype, out=slot)
    else:
        aten.baddbmm.dtype_out(slot, left, right, slot.dtype, out=slot)
