"""Attention to keys and values that a rank keeps in pages from one call of a model to the next.

After PagedAttention (Kwon et al. 2023, arXiv:2309.06180): what a text has of a cache is a list of pages of a few tokens
each, in any order and place, so memory follows the tokens that there are, and texts that begin alike share pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compat.torch_codegen import SHIPPED
from ...ops.define import define_operator
from ...ops.extensions import extend
from ...ops.op_spec import Attention, OpSpec

NOTHING = 0  # the page of each pool that no text has: what is no token is written there


@dataclass(frozen=True)
class PageAccess:
    """The places that a call writes to and reads from: the same in each of its attentions.

    ``slots`` [B * S]: where each new token goes, counted in tokens over all pools. ``pages`` [B * M]: the pages that
    are read of each row. ``seen`` [B, 1, S, M * page]: 0 for those of their tokens that each new one sees, else -inf.
    """

    slots: Tensor
    pages: Tensor
    seen: Tensor

    @classmethod
    def of(cls, cache: Tensor, table: Tensor, places: Tensor, window: int, dtype: torch.dtype) -> PageAccess:
        """``cache`` [P, N, page, ...], ``table`` [B, M] and ``places`` [B, S] are those of :data:`paged_attention`;
        ``dtype``: of queries."""
        pools, count, page = cache.shape[:3]
        at = places.clamp(min=0)
        first = SHIPPED.arange(pools, device=table.device).repeat_interleave(table.shape[0] // pools)[:, None] * count
        pages = table + first
        slots = pages.gather(1, at // page) * page + at % page
        slots = SHIPPED.where(places < 0, (first + NOTHING) * page, slots)
        kept = SHIPPED.arange(table.shape[1] * page, device=table.device)
        seen = kept <= at[:, :, None]
        if window:
            seen &= kept > at[:, :, None] - window
        # as numbers: of truth values, each layer's attention would make them again
        hidden = SHIPPED.zeros(seen.shape, dtype=dtype, device=table.device).masked_fill_(~seen, -torch.inf)
        return cls(slots.flatten(), pages.flatten(), hidden[:, None])


def attend_pages(
    new: tuple[Tensor, Tensor, Tensor], kept: tuple[Tensor, Tensor], access: PageAccess, scale: float
) -> Tensor:
    """Write ``new`` keys and values to the pages of ``kept``, and let the new queries see those of their rows.

    Shapes: new q [B, H, S, D], k [B, G, S, D], v [B, G, S, E]; kept [P, N, page, G, D] and [P, N, page, G, E].
    """
    q, k, v = new
    (rows, heads, count, width), groups = q.shape, k.shape[1]
    keys, values = (_kept(cache, x, access).to(q.dtype) for cache, x in zip(kept, (k, v), strict=True))
    seen, shared = access.seen, heads // groups
    if shared > 1:  # heads of queries that read the same keys are further queries
        q = q.reshape(rows, groups, shared * count, width)
        seen = seen if count == 1 else seen.repeat(1, 1, shared, 1)
    attended = F.scaled_dot_product_attention(q, keys, values, seen, scale=scale)
    return attended.reshape(rows, heads, count, v.shape[3])


def _kept(cache: Tensor, new: Tensor, access: PageAccess) -> Tensor:
    """Return what rows have in their pages [B, G, M * page, D], after ``new`` [B, G, S, D] is written."""
    rest = cache.shape[3:]
    cache.view(-1, *rest).index_copy_(0, access.slots, new.transpose(1, 2).flatten(0, 1).to(cache.dtype))
    pages = cache.view(-1, cache.shape[2], *rest).index_select(0, access.pages)
    return pages.view(len(new), -1, *rest).transpose(1, 2)


def _paged_attention(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, table: Tensor, places: Tensor, *how: Any
) -> Tensor:
    """With caches of its own: only a rank's program writes to those that it is given."""
    scale, window = how
    access = PageAccess.of(keys, table, places, window, q.dtype)
    kept = (keys.clone(memory_format=torch.contiguous_format), values.clone(memory_format=torch.contiguous_format))
    return attend_pages((q, k, v), kept, access, scale)


# Causal attention [B, H, S, E] of S further tokens of each of B texts to all up to themselves, whose keys and values a
# rank keeps in ``keys`` [P, N, page, G, D] and ``values`` [P, N, page, G, E]: first it writes ``k`` and ``v`` there.
# There are P pools of N pages, and the first B / P rows have theirs in the first pool. ``table`` [B, M]: the pages of
# each row in its pool, in the order of its text. ``places`` [B, S]: where in its text a token is; below 0, it is none:
# then nobody reads what is computed. ``window``: how far back a query sees, or 0.
paged_attention = define_operator(
    "paged_attention(Tensor q, Tensor k, Tensor v, Tensor keys, Tensor values, Tensor table, Tensor places, "
    "float scale, int window) -> Tensor",
    lambda q, k, v, *_: q.new_empty([*q.shape[:3], v.shape[3]]),
    _paged_attention,
)
extend(paged_attention, OpSpec(unpadded=True, attention=Attention(), caches=(3, 4), on_rank=True))
