"""Attention to keys and values that a rank keeps from one call of a model to the next."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .attention import visible
from .attention_blocks import Sight
from .define import define_operator


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
    mask = visible(rows, cols, Sight(causal=True, window=window), padding=seen[:, :end])
    mask = mask | (rows[:, None] == cols)  # a position without a token needs some number, which nobody reads
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, keys[:, :, :end], values[:, :, :end], mask, scale=scale, enable_gqa=grouped
    )


def _cached_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, start: Tensor, seen: Tensor, *how: Any
) -> Tensor:
    """With caches of its own: only a rank's program writes to those that it is given."""
    return attend_kept((q, k, v), (keys.clone(), values.clone()), int(start), seen, *how)


# Causal attention [B, H, S, E] of S positions from ``start`` on to all up to themselves, whose keys and values a rank
# keeps in ``keys`` [B, G, L, D] and ``values`` [B, G, L, E]: first it writes ``k`` and ``v`` there. ``seen`` [B, L]:
# whether a position holds a token (one that does not sees itself alone). ``window``: how far back a query sees, or 0.
cached_attention = define_operator(
    "cached_attention(Tensor q, Tensor k, Tensor v, Tensor keys, Tensor values, Tensor start, Tensor seen, "
    "float scale, int window) -> Tensor",
    lambda q, k, v, *_: q.new_empty([*q.shape[:3], v.shape[3]]),
    _cached_attention,
)
