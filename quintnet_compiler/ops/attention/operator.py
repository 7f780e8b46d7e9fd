"""Attention as one operator: what it computes unsplit, whatever later splits it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compat.torch_codegen import SHIPPED
from ..define import define_composite
from .blocks import Sight


def visible(
    rows: Tensor,
    cols: Tensor,
    sight: Sight,
    *,
    padding: Tensor | None = None,
    segments: tuple[Tensor, Tensor] | None = None,
    groups: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return which keys at ``cols`` the queries at ``rows`` see, as bools that broadcast to [B, 1, rows, cols].

    ``padding``: [B, cols], whether a key may be seen at all. ``segments``: the documents of queries [B, rows] and keys;
    ``groups``: as these, of what sees each other whatever else.

    >>> visible(torch.arange(3), torch.arange(3), Sight(causal=True, window=2)).int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [0, 1, 1]], dtype=torch.int32)
    """
    seen = SHIPPED.ones([len(rows), len(cols)], dtype=torch.bool, device=rows.device)
    if sight.causal:
        seen = rows[:, None] >= cols
    if sight.window:
        seen = seen & (rows[:, None] < cols + sight.window)
    if sight.chunk:
        seen = seen & (rows[:, None] // sight.chunk == cols // sight.chunk)
    if segments is not None:
        seen = seen & (segments[0][:, None, :, None] == segments[1][:, None, None, :])
    if groups is not None:
        mine, theirs = groups[0][:, None, :, None], groups[1][:, None, None, :]
        seen = seen | ((mine == theirs) & (mine >= 0))
    if padding is not None:
        seen = seen & padding[:, None, None, :]
    return seen


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    padding: Tensor | None = None,
    segments: Tensor | None = None,
    groups: Tensor | None = None,
    *,
    scale: float,
    mask: str,
    kernel: Callable[..., Tensor] = F.scaled_dot_product_attention,
) -> Tensor:
    """Compute :data:`attention` by ``kernel``."""
    grouped, sight = q.shape[1] != k.shape[1], Sight.parse(mask)
    if padding is None and segments is None and groups is None and sight in (Sight(), Sight(causal=True)):
        return kernel(q, k, v, is_causal=sight.causal, scale=scale, enable_gqa=grouped)
    rows, cols = (SHIPPED.arange(x.shape[2], device=x.device) for x in (q, k))
    documents, joined = (None if ids is None else (ids, ids) for ids in (segments, groups))
    seen = visible(rows, cols, sight, padding=padding, segments=documents, groups=joined)
    if padding is None:
        return kernel(q, k, v, seen, scale=scale, enable_gqa=grouped)
    blind = ~seen.any(-1, keepdim=True)
    out = kernel(q, k, v, seen | blind, scale=scale, enable_gqa=grouped)
    return out.masked_fill(blind, 0.0)


# softmax(q k^T * scale) v, for q [B, H, S, D], k [B, G, T, D], v [B, G, T, E]; H / G heads share one of k and of v.
# A query at position i sees the key at j if what ``mask`` says of i and j holds (see Sight) and ``segments[b, i] ==
# segments[b, j]``, or if ``groups[b, i] == groups[b, j] >= 0``; and only where ``padding[b, j]``. One that sees nothing
# gives 0, as torch does.
attention = define_composite(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? padding=None, Tensor? segments=None, Tensor? groups=None, *, "
    "float scale, str mask) -> Tensor",
    attend,
)
IDS = ("padding", "segments", "groups")  # its arguments that say of positions [B, T] which keys are seen
