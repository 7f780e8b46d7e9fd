"""Attention as one operator: what it computes unsplit, whatever later splits it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .define import define_composite


def visible(
    rows: Tensor,
    cols: Tensor,
    *,
    causal: bool,
    window: int,
    padding: Tensor | None = None,
    segments: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Which keys at positions ``cols`` the queries at ``rows`` see: bools that broadcast to [B, 1, rows, cols].

    ``padding``: [B, cols], whether a key may be seen at all. ``segments``: the documents of queries [B, rows] and keys.

    >>> visible(torch.arange(3), torch.arange(3), causal=True, window=2).int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [0, 1, 1]], dtype=torch.int32)
    """
    seen = torch.ones([len(rows), len(cols)], dtype=torch.bool, device=rows.device)
    if causal:
        seen = rows[:, None] >= cols
    if window:
        seen = seen & (rows[:, None] < cols + window)
    if padding is not None:
        seen = seen & padding[:, None, None, :]
    if segments is not None:
        seen = seen & (segments[0][:, None, :, None] == segments[1][:, None, None, :])
    return seen


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding: Tensor | None = None,
    segments: Tensor | None = None,
    *,
    scale: float,
    causal: bool,
    window: int,
    kernel: Callable[..., Tensor] = F.scaled_dot_product_attention,
) -> Tensor:
    """What :data:`attention` computes, by ``kernel``."""
    grouped = q.shape[1] != k.shape[1]
    if padding is None and segments is None and not window:
        return kernel(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    rows, cols = (torch.arange(x.shape[2], device=x.device) for x in (q, k))
    documents = None if segments is None else (segments, segments)
    mask = visible(rows, cols, causal=causal, window=window, padding=padding, segments=documents)
    if padding is None:
        return kernel(q, k, v, mask, scale=scale, enable_gqa=grouped)
    blind = ~mask.any(-1, keepdim=True)
    found = kernel(q, k, v, mask | blind, scale=scale, enable_gqa=grouped)
    return found.masked_fill(blind, 0.0)


# softmax(q k^T * scale) v, for q [B, H, S, D], k [B, G, T, D], v [B, G, T, E]; H / G heads share one of k and of v.
# A query at position i sees the key at j if: j <= i (``causal``); i - j < ``window`` (where that is not 0);
# ``padding[b, j]``; ``segments[b, i] == segments[b, j]``. One that sees nothing gives 0, as torch does.
attention = define_composite(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? padding=None, Tensor? segments=None, *, "
    "float scale, bool causal, int window) -> Tensor",
    attend,
)
