"""What a rank runs for attention: a kernel of the device where it can, else attention with a mask, or the ring."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ...core.annotations import shape, value
from ...core.errors import CompileError
from ...core.sharding import Shard
from ...ir.builder import GraphBuilder
from ...ir.program import TILE_BYTES, Axis, Strategy
from ...ops.collectives import mirror_halves, ring_attention
from ...ops.rank_local import rows_of
from ...ops.rules.node_factors import argument
from ...ops.tiled_attention import tiled_attention

aten = torch.ops.aten
QUERIES = 2  # the dim of positions in q, k and v


@dataclass(frozen=True)
class LowerAttention:
    """Before: attention(%q: S(2), %k: R, %v: R, scale=0.3, causal=True, window=0)
    After:  %rows = rows_of(%q, ...);  %mask = ge(%rows, arange);  scaled_dot_product_attention(%q, %k, %v, %mask)
    or, where the mask takes more than ``tile_bytes``:  tiled_attention(%q, %k, %v, ...)

    ``strategies``: how the operator runs on each of ``axes``. ``balance``: whether ranks of a ring even out the work
    that causality leaves them. ``tile_bytes``: of the largest mask, and of a tile of what has none.
    """

    builder: GraphBuilder
    axes: Sequence[Axis]
    strategies: Sequence[Strategy]
    balance: bool = True
    tile_bytes: int = TILE_BYTES

    def __call__(self, node: fx.Node, given: Sequence[fx.Node]) -> fx.Node:
        """``node`` on local inputs, of which there are three to five."""
        q, k, v, *ids = given
        names = [name for name in ("padding", "segments") if argument(node, name) is not None]
        found = dict(zip(names, ids, strict=True))
        scale, causal, window = (argument(node, name) for name in ("scale", "causal", "window"))
        call = self.builder.call
        rings = [a for a, s in zip(self.axes, self.strategies, strict=True) if s.exchanges]
        if rings:
            (axis,) = rings
            if axis.role == "time":
                raise CompileError("QN104", "keys cannot travel between microbatches", where=self.builder.where)
            even = self.balance and causal and not window and shape(q)[QUERIES] % 2 == 0
            options = [found.get("padding"), found.get("segments"), scale, causal, window, even, self.tile_bytes]
            mirrored = axis.name, axis.size, QUERIES
            q, k, v = (call(mirror_halves, x, *mirrored) if even else x for x in (q, k, v))
            made = self.builder.getitem(call(ring_attention, q, axis.name, axis.size, k, v, *options), 0)
            return call(mirror_halves, made, *mirrored) if even else made
        grouped: dict[str, Any] = {"enable_gqa": True} if shape(q)[1] != shape(k)[1] else {}
        cuts = [
            (axis.name, axis.size, kind.parts, kind.unit)
            for axis, s in zip(self.axes, self.strategies, strict=True)
            if isinstance(kind := s.outputs[0], Shard) and kind.dim == QUERIES
        ]
        if not (window or found or (causal and cuts)):
            return self._kernel(q, k, v, None, causal, scale=scale, **grouped)
        whole = shape(node)[QUERIES]
        sizes = [shape(q)[0] if found else 1, shape(q)[QUERIES], shape(k)[QUERIES]]
        if not (causal or window or "segments" in found):
            sizes[1] = 1  # padding hides the same keys from every query
        # tiles know runs of positions: padding behind all of them goes on counting, in between it cannot
        padded = math.prod(shape(q)[QUERIES : QUERIES + 1] + tuple(size for _, size, *_ in cuts))
        runs = padded == whole or (len(cuts) == 1 and cuts[0][2] == 1)
        if runs and math.prod(sizes) * value(q).element_size() > self.tile_bytes:
            whole, places = padded, [list(column) for column in zip(*cuts, strict=True)][:3] or [[], [], []]
            options = [found.get("padding"), found.get("segments"), scale, causal, window, self.tile_bytes]
            return self.builder.getitem(call(tiled_attention, q, k, v, *options, whole, *places), 0)
        mask = self._mask(q, k, cuts, found, causal, window, whole)
        if grouped:  # with a mask, kernels want as many heads of keys as of queries
            k, v = (call(aten.repeat_interleave.self_int, x, shape(q)[1] // shape(k)[1], 1) for x in (k, v))
        blind = None
        if "padding" in found:
            blind = call(aten.logical_not.default, call(aten.any.dim, mask, -1, True))
            mask = call(aten.logical_or.default, mask, blind)
        out = self._kernel(q, k, v, mask, False, scale=scale)
        return out if blind is None else call(aten.masked_fill.Scalar, out, blind, 0.0)

    def _kernel(self, q: fx.Node, k: fx.Node, v: fx.Node, mask: fx.Node | None, causal: Any, **how: Any) -> fx.Node:
        """Flash kernels take one width: zeros add nothing to a score, and are cut off the result. Without them, scores
        would be written out."""
        call, width = self.builder.call, shape(v)[-1]
        most = max(width, shape(q)[-1])
        q, k, v = (
            call(aten.constant_pad_nd.default, x, [0, most - shape(x)[-1]]) if shape(x)[-1] < most else x
            for x in (q, k, v)
        )
        out = call(aten.scaled_dot_product_attention.default, q, k, v, mask, 0.0, causal, **how)
        return call(aten.slice.Tensor, out, 3, 0, width) if width < most else out

    def _mask(
        self,
        q: fx.Node,
        k: fx.Node,
        cuts: Sequence[tuple[str, int, int, int]],
        found: dict[str, fx.Node],
        causal: bool,
        window: int,
        whole: int,
    ) -> fx.Node:
        """As :func:`quintnet_compiler.ops.attention.visible`, for the queries that this rank has."""
        call, reshape, device = self.builder.call, self.builder.reshape, value(q).device
        count, keys = shape(q)[QUERIES], shape(k)[QUERIES]
        cols = call(aten.arange.default, keys, dtype=torch.int64, device=device)
        rows = call(aten.arange.default, count, dtype=torch.int64, device=device)
        if cuts:
            rows = call(rows_of, q, QUERIES, whole, *(list(column) for column in zip(*cuts, strict=True)))
        parts: list[fx.Node] = []
        if causal or window:
            behind = call(aten.sub.Tensor, reshape(rows, [count, 1]), cols)
            parts += [call(aten.ge.Scalar, behind, 0)] if causal else []
            parts += [call(aten.lt.Scalar, behind, window)] if window else []
        if "padding" in found:
            parts.append(reshape(found["padding"], [shape(found["padding"])[0], 1, 1, keys]))
        if "segments" in found:
            theirs = found["segments"]
            mine = call(aten.index_select.default, theirs, 1, rows) if cuts else theirs
            batch = shape(theirs)[0]
            parts.append(
                call(aten.eq.Tensor, reshape(mine, [batch, 1, count, 1]), reshape(theirs, [batch, 1, 1, keys]))
            )
        mask = parts[0]
        for part in parts[1:]:
            mask = call(aten.logical_and.default, mask, part)
        return mask
