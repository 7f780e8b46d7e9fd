"""Matrix products that are accumulated directly in a gradient's memory."""

from __future__ import annotations

import torch
from torch import Tensor

from ...compat.torch import has_kernel
from ...compat.torch_codegen import SHIPPED

aten = torch.ops.aten
NARROW = (torch.float16, torch.bfloat16)
_WIDE = [getattr(packet, "dtype_out", None) for packet in (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)]


def adds_up(slot: Tensor, factor: Tensor) -> bool:
    """Return whether a kernel accumulates products of matrices like ``factor`` in ``slot``.

    There is one for equal dtypes, and on CUDA for 16-bit factors and a float32 slot.
    """
    if factor.dtype is slot.dtype:
        return True
    if factor.dtype not in NARROW or slot.dtype is not torch.float32 or slot.is_meta:
        return False
    return all(op is not None and has_kernel(op, slot.device) for op in _WIDE)


def put_product(slot: Tensor, left: Tensor, right: Tensor) -> None:
    """Set ``slot`` to ``left @ right``, of matrices or batches of them.

    Products of 16-bit factors are summed in float32, and rounded only to the dtype of ``slot``.
    """
    if left.dtype is slot.dtype:
        (SHIPPED.mm if slot.dim() == 2 else SHIPPED.bmm)(left, right, out=slot)
    elif slot.dim() == 2:
        aten.mm.dtype_out(left, right, slot.dtype, out=slot)
    else:
        aten.bmm.dtype_out(left, right, slot.dtype, out=slot)


def add_product(slot: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left @ right`` to ``slot``, with the roundings of :func:`put_product`."""
    if left.dtype is slot.dtype:
        (slot.addmm_ if slot.dim() == 2 else slot.baddbmm_)(left, right)
    elif slot.dim() == 2:
        aten.addmm.dtype_out(slot, left, right, slot.dtype, out=slot)
    else:
        aten.baddbmm.dtype_out(slot, left, right, slot.dtype, out=slot)
