"""Attention of runs of queries to runs of keys, whose masks are made tile by tile from positions and ids.

The attention to all keys is the sum of those to parts of them, weighted by their logs of the sums of exponentials
(Milakov and Gimelshein 2018; Dao et al. 2022).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.precision import widened
from .attention import visible
from .attention_blocks import Block, Seen, Sight
from .attention_kernels import Gradients, Operands, kernel_for

FEATURES = 8  # of a head: kernels of GPUs take multiples of so many
NONE = float("-inf")  # the log of a sum of no exponentials


@dataclass(frozen=True)
class AttentionInputs:
    """What attention reads: q [B, H, S, D], k [B, G, T, D], v [B, G, T, E]; ``padding`` [B, T] (True: seen) and
    ``segments`` [B, T], the documents of positions."""

    q: Tensor
    k: Tensor
    v: Tensor
    padding: Tensor | None = None
    segments: Tensor | None = None


@dataclass(frozen=True)
class Ids:
    """What hides keys beside positions: ``padding`` [B, keys] (True: seen), ``documents`` of queries and of keys."""

    padding: Tensor | None = None
    documents: tuple[Tensor, Tensor] | None = None

    @property
    def empty(self) -> bool:
        return self.padding is None and self.documents is None

    @property
    def batch(self) -> int:
        """How many rows of a batch have masks of their own."""
        given = self.padding if self.documents is None else self.documents[0]
        return 1 if given is None else given.shape[0]

    def part(self, rows: slice, cols: slice) -> Ids:
        """Those of some queries and keys."""
        padding = None if self.padding is None else self.padding[:, cols]
        documents = None if self.documents is None else (self.documents[0][:, rows], self.documents[1][:, cols])
        return Ids(padding, documents)


class Total:
    """The attention of a run of queries to the keys that were added so far: [B, H, S, E], and its logs [B, H, S], in a
    wide dtype."""

    def __init__(self, q: Tensor, width: int) -> None:
        self.dtype, wide = q.dtype, widened(q.dtype)
        self.out = torch.zeros([*q.shape[:3], width], dtype=wide, device=q.device)
        self.lse = torch.full(q.shape[:3], NONE, dtype=wide, device=q.device)

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """The attention of some of the queries to other keys; the log of a query that sees none of them is -inf."""
        mine, before = self.out[:, :, rows], self.lse[:, :, rows]
        after = torch.logaddexp(before, lse)
        base = after.masked_fill(after == NONE, 0.0)  # -inf less -inf is not a number
        mine.mul_((before - base).exp_().unsqueeze(-1)).add_(out * (lse - base).exp_().unsqueeze(-1))
        before.copy_(after)

    def finished(self) -> tuple[Tensor, Tensor]:
        """The result, and its logs: 0 and -inf for queries that saw nothing."""
        return self.out.to(self.dtype), self.lse


@dataclass(frozen=True)
class _Part:
    """Queries and keys of a block of which some are seen: up to the diagonal (``causal``), or as ``mask`` says
    ([B or 1, 1, queries, keys]; True: seen).

    Kernels differ in what they make of a query that sees nothing. None is given any: such a query (``blind``,
    [B or 1, 1, queries]) sees all keys, and the log of its sum says afterwards that it saw none.
    """

    rows: slice
    cols: slice
    causal: bool
    mask: Tensor | None = None

    @cached_property
    def blind(self) -> Tensor | None:
        return None if self.mask is None else self.mask.any(-1).logical_not_()

    def operands(self, q: Tensor, k: Tensor, v: Tensor) -> Operands:
        """What a kernel is given: scores of keys that are not seen become -inf."""
        bias = None
        if self.mask is not None and self.blind is not None:
            shown = self.mask | self.blind.unsqueeze(-1)
            bias = torch.zeros(shown.shape, dtype=q.dtype, device=q.device).masked_fill_(~shown, NONE)
        return Operands(q[:, :, self.rows], k[:, :, self.cols], v[:, :, self.cols], bias, self.causal)

    def log(self, lse: Tensor, of_blind: float) -> Tensor:
        """``lse`` with another value for queries that see nothing."""
        return lse if self.blind is None else lse.masked_fill(self.blind, of_blind)


@dataclass(frozen=True)
class AttentionTiles:
    """What attention is; no tile takes more than about ``tile_bytes``."""

    scale: float
    sight: Sight
    tile_bytes: int

    def forward(self, block: Block, q: Tensor, k: Tensor, v: Tensor, ids: Ids, into: Total) -> None:
        """Add the attention to a run of keys to that of a run of queries."""
        if q.is_meta:
            return
        width = v.shape[-1]
        q, k, v = _same_width(q, k, v)
        kernel = kernel_for(q, k, v)
        for part in self._parts(block, q, k, ids, kernel.fused):
            given = part.operands(q, k, v)
            out, lse = kernel.forward(given, self.scale)
            into.add(part.rows, out[..., :width], part.log(lse, NONE))
            del part, given, out, lse  # before the next ones are made

    def backward(
        self,
        block: Block,
        grad: Tensor,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        k: Tensor,
        v: Tensor,
        ids: Ids,
        into: Gradients,
    ) -> None:
        """Add the terms of this run of keys to the gradients of q, k and v, which have a wide dtype. ``out`` and
        ``lse``: the attention to all keys, see :meth:`Total.finished`."""
        if q.is_meta:
            return
        widths = (q.shape[-1], k.shape[-1], v.shape[-1])
        lse = lse.masked_fill(lse == NONE, -NONE)  # every weight of a query that sees nothing is 0
        q, k, v, grad, out = _same_width(q, k, v, grad, out)
        kernel = kernel_for(q, k, v)
        for part in self._parts(block, q, k, ids, kernel.fused):
            given, rows, cols = part.operands(q, k, v), part.rows, part.cols
            logs = part.log(lse[:, :, rows], -NONE)
            found = kernel.backward(grad[:, :, rows], out[:, :, rows], logs, given, self.scale)
            for total, at, term, width in zip(into, (rows, cols, cols), found, widths, strict=True):
                total[:, :, at] += term[..., :width]
            del part, given, logs, found, term

    def _parts(self, block: Block, q: Tensor, k: Tensor, ids: Ids, fused: bool) -> Iterator[_Part]:
        if fused:  # what takes memory is the mask
            masks = ids.batch * (k.shape[1] if ids.batch > 1 and k.shape[1] < q.shape[1] else 1)
            cells = self.tile_bytes // (masks * q.element_size())
        else:  # the scores
            cells = self.tile_bytes // (q.shape[0] * q.shape[1] * widened(q.dtype).itemsize)
        for part, seen in self.sight.parts(block, cells, tiled=not (fused and ids.empty)):
            rows, cols = block.places(part)
            if ids.empty and seen != "some":
                yield _Part(rows, cols, seen == "diagonal")
            else:
                yield _Part(rows, cols, False, self._mask(part, seen, ids.part(rows, cols), q.device))

    def _mask(self, part: Block, seen: Seen, ids: Ids, device: torch.device) -> Tensor:
        """[B or 1, 1, queries, keys]: which are seen."""
        rows, cols = (
            torch.arange(first, end, device=device) for first, end in zip((part.row, part.col), part.ends, strict=True)
        )
        causal, window = (False, 0) if seen == "all" else (self.sight.causal, self.sight.window)
        mask = visible(rows, cols, causal=causal, window=window, padding=ids.padding, segments=ids.documents)
        return mask if mask.dim() == 4 else mask[None, None]


def _same_width(*given: Tensor) -> list[Tensor]:
    """With as many features as most have, or a few more, as kernels want: zeros add nothing to a score."""
    most = max(x.shape[-1] for x in given)
    most += -most % FEATURES if given[0].is_cuda else 0
    return [x if x.shape[-1] == most else F.pad(x, (0, most - x.shape[-1])) for x in given]
