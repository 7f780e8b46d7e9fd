"""Attention to keys and values that a rank keeps from one call of a model to the next."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import visible


def attend_kept(
    new: tuple[Tensor, Tensor, Tensor],
    kept: tuple[Tensor, Tensor],
    start: int,
    seen: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    """Write ``new`` keys and values to ``kept`` from position ``start`` on, and let the new queries see all until then.

    Shapes: new q [B, H, S, D], k [B, G, S, D], v [B, G, S, E]; kept [B, G, L, D] and [B, G, L, E]; ``seen`` [B, L].
    """
    q, k, v = new
    keys, values = kept
    end = start + k.shape[2]
    keys[:, :, start:end] = k
    values[:, :, start:end] = v
    rows, cols = torch.arange(start, end, device=q.device), torch.arange(end, device=q.device)
    mask = visible(rows, cols, causal=True, window=window, padding=seen[:, :end])
    mask = mask | (rows[:, None] == cols)  # a position without a token needs some number, which nobody reads
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, keys[:, :, :end], values[:, :, :end], mask, scale=scale, enable_gqa=grouped
    )
