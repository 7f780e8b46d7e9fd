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
from .attention_ids import FEW, Row
from .attention_kernels import Gradients, Operands, kernel_for

FEATURES = 8  # of a head: kernels of GPUs take multiples of so many
NONE = float("-inf")  # the log of a sum of no exponentials


@dataclass(frozen=True)
class AttentionInputs:
    """What attention reads: q [B, H, S, D], k [B, G, T, D], v [B, G, T, E]; and what says of all positions [B, length],
    on the host, which are seen (see :data:`.attention.attention`)."""

    q: Tensor
    k: Tensor
    v: Tensor
    padding: Tensor | None = None
    segments: Tensor | None = None
    groups: Tensor | None = None
    few: int = FEW

    @cached_property
    def ids(self) -> Ids:
        return Ids(self.padding, self.segments, self.groups, self.few)


@dataclass(frozen=True)
class Ids:
    """What says of positions [B, length] which are seen, beside what follows from their places: on the host."""

    padding: Tensor | None = None
    segments: Tensor | None = None
    groups: Tensor | None = None
    few: int = FEW

    @cached_property
    def rows(self) -> list[Row]:
        """Of each row of the batch; none where nothing is said, or nothing has values."""
        given = (self.padding, self.segments, self.groups)
        count = next((0 if x.is_meta else len(x) for x in given if x is not None), 0)
        padding, segments, groups = (
            [None] * count if x is None or not count else list(x.cpu().unbind()) for x in given
        )
        return [Row(*row, self.few) for row in zip(padding, segments, groups, strict=True)]

    def sees(self, sight: Sight, block: Block) -> bool:
        """Whether any query of a block may see any of its keys, in any row of the batch."""
        if not self.rows:
            return sight.seen(block) is not None
        return any(row.sees(sight, block) for row in self.rows)

    def mask(self, sight: Sight, row: int, part: Block, device: torch.device) -> Tensor:
        """[1, 1, queries, keys]: which are seen in one row of the batch."""
        rows, cols = (
            torch.arange(first, end, device=device) for first, end in zip((part.row, part.col), part.ends, strict=True)
        )
        at = slice(row, row + 1)

        def both(ids: Tensor | None) -> tuple[Tensor, Tensor] | None:
            places = (slice(first, end) for first, end in zip((part.row, part.col), part.ends, strict=True))
            mine, theirs = (None if ids is None else ids[at, place].to(device) for place in places)
            return None if mine is None or theirs is None else (mine, theirs)

        padding = None if self.padding is None else self.padding[at, part.col : part.ends[1]].to(device)
        mask = visible(rows, cols, sight, padding=padding, segments=both(self.segments), groups=both(self.groups))
        return mask if mask.dim() == 4 else mask[None, None]


class Total:
    """The attention of a run of queries to the keys that were added so far: [B, H, S, E], and its logs [B, H, S], in a
    wide dtype."""

    def __init__(self, q: Tensor, width: int) -> None:
        self.dtype, wide = q.dtype, widened(q.dtype)
        self.out = torch.zeros([*q.shape[:3], width], dtype=wide, device=q.device)
        self.lse = torch.full(q.shape[:3], NONE, dtype=wide, device=q.device)

    def add(self, batch: slice, rows: slice, out: Tensor, lse: Tensor) -> None:
        """The attention of some of the queries to other keys; the log of a query that sees none of them is -inf."""
        mine, before = self.out[batch, :, rows], self.lse[batch, :, rows]
        after = torch.logaddexp(before, lse)
        base = after.masked_fill(after == NONE, 0.0)  # -inf less -inf is not a number
        mine.mul_((before - base).exp_().unsqueeze(-1)).add_(out * (lse - base).exp_().unsqueeze(-1))
        before.copy_(after)

    def finished(self) -> tuple[Tensor, Tensor]:
        """The result, and its logs: 0 and -inf for queries that saw nothing."""
        return self.out.to(self.dtype), self.lse


@dataclass(frozen=True)
class _Part:
    """Queries and keys of a block of which some are seen, in some rows of the batch: up to the diagonal (``causal``),
    or as ``mask`` says ([1, 1, queries, keys]; True: seen).

    Kernels differ in what they make of a query that sees nothing. None is given any: such a query (``blind``,
    [1, 1, queries]) sees all keys, and the log of its sum says afterwards that it saw none.
    """

    batch: slice
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
        q, k, v = (x[self.batch, :, at] for x, at in ((q, self.rows), (k, self.cols), (v, self.cols)))
        return Operands(q, k, v, bias, self.causal)

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
        for part in self._parts(block, q, ids, kernel.fused):
            given = part.operands(q, k, v)
            out, lse = kernel.forward(given, self.scale)
            into.add(part.batch, part.rows, out[..., :width], part.log(lse, NONE))
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
        for part in self._parts(block, q, ids, kernel.fused):
            given, batch, rows, cols = part.operands(q, k, v), part.batch, part.rows, part.cols
            logs = part.log(lse[batch, :, rows], -NONE)
            found = kernel.backward(grad[batch, :, rows], out[batch, :, rows], logs, given, self.scale)
            for total, at, term, width in zip(into, (rows, cols, cols), found, widths, strict=True):
                total[batch, :, at] += term[..., :width]
            del part, given, logs, found, term

    def _parts(self, block: Block, q: Tensor, ids: Ids, fused: bool) -> Iterator[_Part]:
        rows = q.shape[0] if not ids.rows else 1
        # what takes memory is the mask of a fused kernel, which has no rows of the batch, or the scores
        one = q.element_size() if fused else rows * q.shape[1] * widened(q.dtype).itemsize
        for row, tile, seen, hidden in self._tiles(block, ids, self.tile_bytes // one, tiled=not fused):
            batch = slice(None) if row is None else slice(row, row + 1)
            places = block.places(tile)
            if seen == "some":
                told = ids if hidden else Ids()
                yield _Part(batch, *places, False, told.mask(self.sight, row or 0, tile, q.device))
            else:
                yield _Part(batch, *places, seen == "diagonal")

    def _tiles(self, block: Block, ids: Ids, cells: int, tiled: bool) -> Iterator[tuple[int | None, Block, Seen, bool]]:
        """What is seen of a block: in which row of the batch (None: in all), how much, and whether ids hide some."""
        if not ids.rows:
            yield from ((None, tile, seen, False) for tile, seen in self.sight.parts(block, cells, tiled))
        for i, row in enumerate(ids.rows):
            yield from ((i, *found) for found in row.parts(self.sight, block, cells, tiled))


def _same_width(*given: Tensor) -> list[Tensor]:
    """With as many features as most have, or a few more, as kernels want: zeros add nothing to a score."""
    most = max(x.shape[-1] for x in given)
    most += -most % FEATURES if given[0].is_cuda else 0
    return [x if x.shape[-1] == most else F.pad(x, (0, most - x.shape[-1])) for x in given]
