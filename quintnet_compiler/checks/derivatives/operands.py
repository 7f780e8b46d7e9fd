"""Operands with drawn values, in memory as the program has them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .calls import OperatorCall


def elements(call: OperatorCall) -> int:
    """Return the number of elements of all operands and tangents."""
    return sum(x.numel() for x in (*call.operands, *call.tangents) if x is not None)


def drawn(like: Tensor, generator: torch.Generator, bound: int, positive: bool) -> Tensor:
    """Return drawn values for a fake tensor, with its order in memory, gaps and repetitions."""
    strides = nested_strides(like, like.shape)
    count = 1 + sum((n - 1) * s for n, s in zip(like.shape, strides, strict=True)) if like.numel() else 0
    if like.dtype is torch.bool:
        flat = torch.rand(count, generator=generator, device="cpu") > 0.5
    elif like.is_floating_point() or like.is_complex():
        wide = torch.complex128 if like.is_complex() else torch.float64
        flat = torch.randn(count, generator=generator, dtype=wide, device="cpu")
        flat = (flat.abs() / 4 + 0.1).clamp(max=0.9).to(like.dtype) if positive else flat.to(like.dtype)
    else:
        flat = torch.randint(0, bound, (count,), generator=generator, dtype=like.dtype, device="cpu")
    return flat.as_strided(like.shape, strides)


def nested_strides(like: Tensor, sizes: Sequence[int]) -> list[int]:
    """Return strides for ``sizes`` that are nested as those of ``like``.

    Of dims with one stride those of size 1 come first: (4, 1, 1, 1) of a 1 x 1 kernel is contiguous, and (4, 1, 4, 4)
    would have its channels last, which chooses other kernels.
    """
    strides, span, dense = [0] * len(sizes), 1, 1
    order = sorted((s, like.shape[d] > 1, d) for d, s in enumerate(like.stride()) if s)
    for stride, _, dim in order:
        gap = like.shape[dim] > 1 and stride > dense
        strides[dim] = span * 2 if gap else span
        span, dense = strides[dim] * max(sizes[dim], 1), max(dense, stride * like.shape[dim])
    return strides
