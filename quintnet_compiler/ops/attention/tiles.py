"""Attention of runs of queries to runs of keys, whose masks are made tile by tile from positions and ids.

The attention to all keys is the sum of those to parts of them, weighted by their logs of the sums of exponentials
(Milakov and Gimelshein 2018; Dao et al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ...compat.torch_codegen import SHIPPED
from ...core.precision import widened
from .blocks import Block, Sight
from .ids import FEW, Pair, Row
from .kernels import AttentionKernel, Gradients, Operands, kernel_for
from .operator import visible
from .spans import AttentionTerm, Backward, Calls, SpansCall, Where

Shown: TypeAlias = tuple[Sequence[SpansCall], Sequence[tuple[int | None, Pair]]]  # pairs of a row of the batch, or all
FEATURES = 8  # of a head: kernels of GPUs take multiples of so many
WHOLE = 2**62  # scores of a tile that is never cut
NONE = float("-inf")  # the log of a sum of no exponentials


@dataclass(frozen=True)
class Ids:
    """Ids of positions [B, length] on the host, which decide with the positions themselves what is seen."""

    padding: Tensor | None = None
    segments: Tensor | None = None
    groups: Tensor | None = None
    few: int = FEW
    _shown: dict[tuple[object, ...], Shown] = field(default_factory=dict, init=False, compare=False, repr=False)

    @cached_property
    def rows(self) -> list[Row]:
        """Return the ids of each row of the batch; nothing if there are none, or they have no values."""
        ids = (self.padding, self.segments, self.groups)
        count = next((0 if x.is_meta else len(x) for x in ids if x is not None), 0)
        padding, segments, groups = ([None] * count if x is None or not count else list(x.cpu().unbind()) for x in ids)
        return [Row(*row, self.few) for row in zip(padding, segments, groups, strict=True)]

    def sees(self, sight: Sight, block: Block) -> bool:
        """Return whether any query of a block may see any of its keys, in any row of the batch."""
        if not self.rows:
            return sight.seen(block) is not None
        return any(row.sees(sight, block) for row in self.rows)

    def shown(self, sight: Sight, block: Block, count: int, *, lengths: bool) -> Shown:
        """Return what is seen of a block in ``count`` rows of the batch; layers of a model ask for the same.

        ``lengths``: what needs no mask of its own is in as few calls as possible.
        """
        key = (sight, block, count, lengths)
        if key not in self._shown:
            calls, pairs = Calls(block), list[tuple[int | None, Pair]]()
            every: list[tuple[int | None, Pair]] = [
                (i, pair)
                for i, row in enumerate(self.rows)
                for pair in (row.apart if lengths else row).pairs(sight, block)
            ]
            if not self.rows:
                every = [(i, Pair(block, sight)) for i in (range(count) if lengths else [None])]
            for row, pair in every:
                if lengths and row is not None and not pair.hidden:
                    calls.add(row, pair.sight.spans(pair.block))
                else:
                    pairs.append((row, pair))
            self._shown[key] = calls.made, pairs
        return self._shown[key]

    def computed_pairs(self, sight: Sight, block: Block) -> float:
        """Return the pairs of a query and a key of a block that kernels compute, in all rows of the batch.

        A tile up to its diagonal counts half.

        >>> Ids().computed_pairs(Sight(causal=True), Block(4, 4, 0, 8))
        24.0
        """
        pairs = [pair for row in self.rows for pair in row.pairs(sight, block)] if self.rows else [Pair(block, sight)]
        tiles = (tile for pair in pairs for tile in pair.tiles(WHOLE, tiled=False))
        return sum(tile.rows * tile.cols / (2 if seen == "diagonal" else 1) for tile, seen in tiles)

    def mask(self, sight: Sight, row: int, part: Block, device: torch.device) -> Tensor:
        """Return which keys are seen in one row of the batch, [1, 1, queries, keys]."""
        rows, cols = (
            SHIPPED.arange(first, end, device=device)
            for first, end in zip((part.row, part.col), part.ends, strict=True)
        )
        at = slice(row, row + 1)

        def both(ids: Tensor | None) -> tuple[Tensor, Tensor] | None:
            places = (slice(first, end) for first, end in zip((part.row, part.col), part.ends, strict=True))
            mine, theirs = (None if ids is None else ids[at, place].to(device) for place in places)
            return None if mine is None or theirs is None else (mine, theirs)

        padding = None if self.padding is None else self.padding[at, part.col : part.ends[1]].to(device)
        mask = visible(rows, cols, sight, padding=padding, segments=both(self.segments), groups=both(self.groups))
        return mask if mask.dim() == 4 else mask[None, None]


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of attention: q [B, H, S, D], k [B, G, T, D], v [B, G, T, E].

    ``ids``: those of all positions [B, length], on the host, see :data:`.operator.attention`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    ids: Ids


class Total:
    """The attention of a run of queries to the keys that were added so far: [B, H, S, E], and its logs [B, H, S], in a
    wide dtype if there is more than one term."""

    def __init__(self, q: Tensor, width: int) -> None:
        self.like, self.shape, self.wide = q, (*q.shape[:3], width), widened(q.dtype)
        self.sums: tuple[Tensor, Tensor] | None = None

    def add(self, term: AttentionTerm) -> None:
        """Add the attention of some of the queries to other keys."""
        if self.sums is None:
            if term.seen and term.out.numel() == math.prod(self.shape):
                rows, heads, places, width = self.shape
                out, lse = term.out.reshape(rows, places, heads, width), term.lse.reshape(rows, places, heads)
                self.sums = out.transpose(1, 2), lse.transpose(1, 2)
                return
            empty = self.like.new_zeros(self.shape, dtype=self.wide)
            self.sums = empty, self.like.new_full(self.shape[:3], NONE, dtype=self.wide)
        self.sums = self.sums[0].to(self.wide), self.sums[1]
        outs, logs = (x.transpose(1, 2) for x in self.sums)
        mine, old_logs = outs[term.at], logs[term.at]
        out, lse = term.out.reshape(mine.shape), term.lse.reshape(old_logs.shape)
        new_logs = torch.logaddexp(old_logs, lse)
        base = new_logs.masked_fill(new_logs == NONE, 0.0)  # -inf less -inf is not a number
        mine.mul_((old_logs - base).exp_().unsqueeze(-1)).add_(out * (lse - base).exp_().unsqueeze(-1))
        logs[term.at] = new_logs
        if any(isinstance(x, Tensor) for x in term.at):  # a copy, not a view
            outs[term.at] = mine

    def finished(self) -> tuple[Tensor, Tensor]:
        """Return the result, and its logs: 0 and -inf for queries that saw nothing."""
        if self.sums is None:
            zeros = self.like.new_zeros(self.shape)
            return zeros, self.like.new_full(self.shape[:3], NONE, dtype=self.wide)
        out, lse = self.sums
        return out.to(self.like.dtype).contiguous(), lse.contiguous()


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

    def _operands(self, q: Tensor, k: Tensor, v: Tensor) -> Operands:
        """Return the operands of a kernel: scores of keys that are not seen become -inf."""
        bias = None
        if self.mask is not None and self.blind is not None:
            shown = self.mask | self.blind.unsqueeze(-1)
            bias = SHIPPED.zeros(shown.shape, dtype=q.dtype, device=q.device).masked_fill_(~shown, NONE)
        q, k, v = (x[self.batch, :, at] for x, at in ((q, self.rows), (k, self.cols), (v, self.cols)))
        return Operands(q, k, v, bias, self.causal)

    def _log(self, lse: Tensor, of_blind: float) -> Tensor:
        """Return ``lse`` with the value ``of_blind`` for queries that see nothing."""
        return lse if self.blind is None else lse.masked_fill(self.blind, of_blind)

    def forward(self, kernel: AttentionKernel, scale: float, q: Tensor, k: Tensor, v: Tensor) -> AttentionTerm:
        out, lse = kernel.forward(self._operands(q, k, v), scale)
        lse = self._log(lse, NONE)
        return AttentionTerm((self.batch, self.rows), out.transpose(1, 2), lse.transpose(1, 2), self.mask is None)

    def backward(self, kernel: AttentionKernel, scale: float, inputs: Backward) -> tuple[tuple[Where, Tensor], ...]:
        batch, rows, cols = self.batch, self.rows, self.cols
        grad, out, lse = (x[batch, :, rows] for x in (inputs.grad, inputs.out, inputs.lse))
        operands = self._operands(inputs.q, inputs.k, inputs.v)
        gradients = kernel.backward(grad, out, self._log(lse, -NONE), operands, scale)
        return tuple(((batch, at), x.transpose(1, 2)) for at, x in zip((rows, cols, cols), gradients, strict=True))


@dataclass(frozen=True)
class AttentionTiles:
    """Attention in tiles, none of which takes more than about ``tile_bytes``."""

    scale: float
    sight: Sight
    tile_bytes: int

    def forward(self, block: Block, q: Tensor, k: Tensor, v: Tensor, ids: Ids, into: Total) -> None:
        """Add the attention to a run of keys to that of a run of queries."""
        if q.is_meta:
            return
        width = v.shape[-1]
        q, k, v = _for_kernels(q, k, v)
        kernel = kernel_for(q, k, v)
        for part in self._parts(block, q, ids, kernel):
            term = part.forward(kernel, self.scale, q, k, v)
            into.add(replace(term, out=term.out[..., :width]))
            del part, term  # before the next ones are made

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
        """Add the terms of this run of keys to the gradients of q, k and v, which have a wide dtype.

        ``out`` and ``lse``: the attention to all keys, see :meth:`Total.finished`.
        """
        if q.is_meta:
            return
        widths = (q.shape[-1], k.shape[-1], v.shape[-1])
        lse = lse.masked_fill(lse == NONE, -NONE)  # every weight of a query that sees nothing is 0
        q, k, v, grad, out = _for_kernels(q, k, v, grad, out)
        kernel, inputs = kernel_for(q, k, v), Backward(grad, q, out, lse, k, v)
        for part in self._parts(block, q, ids, kernel):
            terms = part.backward(kernel, self.scale, inputs)
            for total, (at, term), width in zip(into, terms, widths, strict=True):
                mine = total.transpose(1, 2)
                mine[at] += term[..., :width].reshape(mine[at].shape)
            del part, terms, term

    def _parts(self, block: Block, q: Tensor, ids: Ids, kernel: AttentionKernel) -> Iterator[_Part | SpansCall]:
        calls, pairs = ids.shown(self.sight, block, q.shape[0], lengths=kernel.lengths is not None)
        for row, pair in pairs:
            yield from self._tiles(block, q, ids, kernel.fused, row, pair)
        yield from calls

    def _tiles(self, block: Block, q: Tensor, ids: Ids, fused: bool, row: int | None, pair: Pair) -> Iterator[_Part]:
        batch = slice(None) if row is None else slice(row, row + 1)
        # what takes memory is the mask of a fused kernel, which has no rows of the batch, or the scores
        cell_bytes = q.element_size() if fused else q[batch].shape[0] * q.shape[1] * widened(q.dtype).itemsize
        for tile, seen in pair.tiles(self.tile_bytes // cell_bytes, tiled=not fused):
            places = block.slices_of(tile)
            if seen == "some":
                hiding = ids if pair.hidden else Ids()
                yield _Part(batch, *places, False, hiding.mask(self.sight, row or 0, tile, q.device))
            else:
                yield _Part(batch, *places, seen == "diagonal")


def _for_kernels(*tensors: Tensor) -> list[Tensor]:
    """Pad features to the most of any tensor, or a few more, as kernels require: zeros add nothing to a score.

    Kernels read the features of a position next to each other, whatever their stride is.
    """
    most = max(x.shape[-1] for x in tensors)
    most += -most % FEATURES if tensors[0].is_cuda else 0
    wide = [x if x.shape[-1] == most else F.pad(x, (0, most - x.shape[-1])) for x in tensors]
    return [x if x.stride(-1) == 1 else x.contiguous() for x in wide]
