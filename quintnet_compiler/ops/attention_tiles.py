"""Attention of runs of queries to runs of keys, whose masks are made tile by tile from positions and ids.

The attention to all keys is the sum of those to parts of them, weighted by their logs of the sums of exponentials
(Milakov and Gimelshein 2018; Dao et al. 2022).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core.precision import widened
from .attention import visible
from .attention_blocks import Block, Seen, Sight
from .attention_kernels import Gradients, Operands, kernel_for

FEATURES = 8  # of a head: kernels of GPUs take multiples of so many


def hidden(dtype: torch.dtype) -> float:
    """What is added to a score that is not seen. It is finite, so that no kernel has to know queries that see nothing:
    their log of the sum is about this."""
    return max(torch.finfo(torch.float32).min / 4, torch.finfo(dtype).min)


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
        self.lse = torch.full(q.shape[:3], float("-inf"), dtype=wide, device=q.device)

    def add(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """The attention of some of the queries to other keys; every log is finite."""
        mine, before = self.out[:, :, rows], self.lse[:, :, rows]
        after = torch.logaddexp(before, lse)
        mine.mul_((before - after).exp_().unsqueeze(-1)).add_(out * (lse - after).exp_().unsqueeze(-1))
        before.copy_(after)

    def finished(self) -> tuple[Tensor, Tensor]:
        """The result, and its logs: 0 and -inf for queries that saw nothing."""
        blind = self.lse < hidden(self.dtype) / 2
        out = self.out.masked_fill_(blind.unsqueeze(-1), 0.0).to(self.dtype)
        return out, self.lse.masked_fill_(blind, float("-inf"))


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
        for rows, cols, bias, causal in self._parts(block, q, k, ids, kernel.fused):
            given = Operands(q[:, :, rows], k[:, :, cols], v[:, :, cols], bias, causal)
            out, lse = kernel.forward(given, self.scale)
            into.add(rows, out[..., :width], lse)
            del given, bias, out, lse  # before the next ones are made

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
        lse = lse.masked_fill(lse == float("-inf"), float("inf"))  # every weight of a query that sees nothing is 0
        q, k, v, grad, out = _same_width(q, k, v, grad, out)
        kernel = kernel_for(q, k, v)
        for rows, cols, bias, causal in self._parts(block, q, k, ids, kernel.fused):
            given = Operands(q[:, :, rows], k[:, :, cols], v[:, :, cols], bias, causal)
            found = kernel.backward(grad[:, :, rows], out[:, :, rows], lse[:, :, rows], given, self.scale)
            for total, at, term, width in zip(into, (rows, cols, cols), found, widths, strict=True):
                total[:, :, at] += term[..., :width]
            del given, bias, found, term

    def _parts(
        self, block: Block, q: Tensor, k: Tensor, ids: Ids, fused: bool
    ) -> Iterator[tuple[slice, slice, Tensor | None, bool]]:
        """The queries and the keys of each part that is seen, what to add to their scores, and whether those behind the
        diagonal are hidden."""
        if fused:  # what takes memory is the mask
            masks = ids.batch * (k.shape[1] if ids.batch > 1 and k.shape[1] < q.shape[1] else 1)
            cells = self.tile_bytes // (masks * q.element_size())
        else:  # the scores
            cells = self.tile_bytes // (q.shape[0] * q.shape[1] * widened(q.dtype).itemsize)
        for part, seen in self.sight.parts(block, cells, tiled=not (fused and ids.empty)):
            rows, cols = block.places(part)
            plain = ids.empty and seen != "some"
            bias = None if plain else self._bias(part, seen, ids.part(rows, cols), q)
            yield rows, cols, bias, plain and seen == "diagonal"

    def _bias(self, part: Block, seen: Seen, ids: Ids, q: Tensor) -> Tensor:
        """[B or 1, 1, queries, keys]: 0 where they are seen."""
        rows, cols = (
            torch.arange(first, end, device=q.device)
            for first, end in zip((part.row, part.col), part.ends, strict=True)
        )
        causal, window = (False, 0) if seen == "all" else (self.sight.causal, self.sight.window)
        mask = visible(rows, cols, causal=causal, window=window, padding=ids.padding, segments=ids.documents)
        bias = torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill_(~mask, hidden(q.dtype))
        return bias if bias.dim() == 4 else bias[None, None]


def _same_width(*given: Tensor) -> list[Tensor]:
    """With as many features as most have, or a few more, as kernels want: zeros add nothing to a score."""
    most = max(x.shape[-1] for x in given)
    most += -most % FEATURES if given[0].is_cuda else 0
    return [x if x.shape[-1] == most else F.pad(x, (0, most - x.shape[-1])) for x in given]
