"""The random numbers of programs for the user's module in one process, and the comparison of tensors."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..compat.torch import implementations_of_aten
from ..core.replaced import for_this_thread, one_thread
from ..core.rng import Key, keep_mask
from .random_functions import ProgramNumbers

aten = torch.ops.aten


def whole_mask(x: Tensor, p: float, key: Key) -> Tensor:
    """Return the mask of a dropout over all of ``x``."""
    positions = [torch.arange(size, device=x.device) for size in x.shape]
    return keep_mask(positions, x.shape, p, key)


@contextlib.contextmanager
def same_numbers(seed: int, step: int) -> Iterator[None]:
    """Let torch's dropout (also in attention) and random functions draw the numbers of compiled programs inside.

    Other threads have torch's own.
    """
    numbers = ProgramNumbers(seed, step)

    def dropout(x: Tensor, p: float, train: bool) -> Tensor:
        if not train or p == 0:
            return x
        mask = whole_mask(x, p, numbers.next_key())
        return x * mask * (0.0 if p == 1 else 1 / (1 - p))

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if enable_gqa:
            groups = query.shape[-3] // key.shape[-3]
            key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
        scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if attn_mask is not None:
            masked = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, float("-inf")) if masked else scores + attn_mask
        return dropout(scores.softmax(-1), dropout_p, True) @ value

    ours: dict[Any, Callable[..., Tensor]] = {
        aten.dropout.default: dropout,
        aten.scaled_dot_product_attention.default: attention,
    }
    with one_thread(), implementations_of_aten() as library:
        for operator, function in ours.items():
            for device in ("CPU", "CUDA"):
                library.impl(operator, for_this_thread(function, operator.decompose), f"Autograd{device}")
        with numbers:
            yield


def differs(computed: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Return the largest difference of two tensors, relative to the largest expected element (or ``floor``).

    Infinity for different shapes, or if only one has NaN somewhere.
    """
    if computed.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    if computed.dtype is expected.dtype and computed.dtype in (torch.float32, torch.float64):
        with torch.no_grad():
            size, gap = max(_magnitude(expected), floor), _magnitude(computed - expected)
        if math.isfinite(gap) and math.isfinite(size) and size:
            return gap / size
    a, b = computed.detach().double(), expected.detach().double()
    if bool((a.isnan() != b.isnan()).any()):
        return float("inf")
    size = max(float(b.nan_to_num(0.0, 0.0, 0.0).abs().max()), floor)
    gap = float(torch.where(a == b, 0.0, (a - b).abs()).nan_to_num(0.0, float("inf")).max())
    return gap / size if size else (0.0 if gap == 0 else float("inf"))


def _magnitude(x: Tensor) -> float:
    """Return the largest magnitude of an element; NaN if there is one."""
    low, high = (float(extreme) for extreme in x.detach().aminmax())
    return low if math.isnan(low) else max(-low, high)


def largest(tensors: Sequence[Tensor]) -> float:
    """Return the largest magnitude among tensors."""
    return max((float(x.abs().max()) for x in tensors if x.numel()), default=0.0)
