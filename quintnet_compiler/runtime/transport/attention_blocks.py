"""Attention of a run of queries to a run of keys, as terms of a softmax over more keys, and its gradients.

On an accelerator, a block that is seen wholly or up to its diagonal runs the device's flash kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.precision import widened
from ...ops.attention import visible

aten = torch.ops.aten


@dataclass(frozen=True)
class Block:
    """``count`` queries from position ``row`` on, as many keys from ``col`` on."""

    row: int
    col: int
    count: int
    scale: float
    causal: bool
    window: int

    @property
    def hidden(self) -> bool:
        """Whether no query sees any key.

        >>> [Block(4, col, 4, 1.0, True, 1).hidden for col in (0, 4, 8)]
        [True, False, True]
        """
        last = self.count - 1
        behind = bool(self.window) and self.row - (self.col + last) >= self.window
        return behind or (self.causal and self.col > self.row + last)

    @property
    def seen(self) -> str:
        """``all`` of it, up to the ``diagonal``, or ``some``."""
        last = self.count - 1
        if self.window and self.row + last - self.col >= self.window:
            return "some"
        if not self.causal or self.col + last <= self.row:
            return "all"
        return "diagonal" if self.row == self.col else "some"


@dataclass(frozen=True)
class Mask:
    """What else hides keys: ``padding`` [B, keys] (True: seen), ``documents`` of queries and of keys."""

    padding: Tensor | None = None
    documents: tuple[Tensor, Tensor] | None = None

    @property
    def empty(self) -> bool:
        return self.padding is None and self.documents is None


def merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The attention to two sets of keys, from that to each: (output, log of the sum of exponentials)."""
    lse = torch.logaddexp(a[1], b[1])
    safe = lse.masked_fill(lse == float("-inf"), 0.0)  # a query that has seen nothing yet
    return sum(out * (part - safe).exp_().unsqueeze(-1) for out, part in (a, b)), lse  # type: ignore[return-value]


def forward(block: Block, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """The block's own attention, in a wide dtype, and its log of the sum of exponentials."""
    wide = widened(q.dtype)
    if q.is_meta:
        return q.new_empty([*q.shape[:3], v.shape[3]], dtype=wide), q.new_empty(q.shape[:3], dtype=wide)
    if _flash(block, q, v, mask):
        causal = block.seen == "diagonal"
        out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=block.scale)
        return out.to(wide), lse
    scores = _scores(block, q, k, mask)
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - lse.masked_fill(lse == float("-inf"), 0.0)).exp_()
    out = _rows(weights) @ v.to(wide)
    return out.view(*q.shape[:3], -1), lse.view(q.shape[:3])


def backward(
    block: Block, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor, mask: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    """The block's terms of the gradients of q, k and v. ``out`` and ``lse`` are those of all keys."""
    wide = widened(q.dtype)
    if q.is_meta:
        return q.to(wide), k.to(wide), v.to(wide)
    if _flash(block, q, v, mask):
        return _flash_backward(block, grad, q, out, lse, k, v)
    scores = _scores(block, q, k, mask)
    grouped = scores.shape[:-1]
    weights = (scores - lse.masked_fill(lse == float("-inf"), 0.0).view(*grouped, 1)).exp_()
    grad_, q_, k_, v_ = (x.to(wide) for x in (grad, q, k, v))
    grad_ = grad_.view(*grouped, -1)
    inner = (grad_ * out.to(wide).view(*grouped, -1)).sum(-1, keepdim=True)
    rows = _rows(grad_)
    slopes = weights * ((rows @ v_.mT).view(scores.shape) - inner) * block.scale
    flat = _rows(slopes)
    return (flat @ k_).view(q.shape), flat.mT @ _rows(q_.view(*grouped, -1)), _rows(weights).mT @ rows


def _scores(block: Block, q: Tensor, k: Tensor, mask: Mask) -> Tensor:
    """[B, key heads, query heads of each, queries, keys]; -inf for what is not seen."""
    batch, heads, count, _ = q.shape
    wide = widened(q.dtype)
    grouped = q.to(wide).reshape(batch, k.shape[1], heads // k.shape[1], count, -1)
    scores = (_rows(grouped) @ k.to(wide).mT).view(*grouped.shape[:-1], -1) * block.scale
    if block.seen == "all" and mask.empty:
        return scores
    rows, cols = (torch.arange(at, at + block.count, device=q.device) for at in (block.row, block.col))
    seen = visible(rows, cols, causal=block.causal, window=block.window, padding=mask.padding, segments=mask.documents)
    return scores.masked_fill_(~(seen if seen.dim() == 2 else seen.unsqueeze(1)), float("-inf"))


def _rows(x: Tensor) -> Tensor:
    """The query heads of a key head as rows of one matrix."""
    return x.flatten(2, 3)


def _flash(block: Block, q: Tensor, v: Tensor, mask: Mask) -> bool:
    half = q.dtype in (torch.float16, torch.bfloat16)
    fits = q.shape[-1] == v.shape[-1] <= 256 and q.shape[-1] % 8 == 0
    return q.is_cuda and half and fits and mask.empty and block.seen != "some"


def _flash_backward(
    block: Block, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel weights scores by the ``lse`` of all keys, so that its results are terms of the whole gradient."""
    seed = torch.zeros((), dtype=torch.uint64, device=q.device)  # of its dropout, of which there is none
    found: tuple[Tensor, Tensor, Tensor] = aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, block.seen == "diagonal",
        seed, seed, scale=block.scale,
    )  # fmt: skip
    return found
