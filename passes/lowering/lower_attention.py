"""What a rank runs for attention: a kernel of the device where it can, else attention with a mask, or the ring."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import fx

from ...core.annotations import shape, value
from ...core.errors import CompileError
from ...core.sharding import Shard
from ...ir.builder import GraphBuilder
from ...ir.program import TILE_BYTES, Axis, Strategy
from ...ops.attention.blocks import Sight
from ...ops.attention.operator import IDS
from ...ops.attention.ring_plan import ring_plan, runs_of_rank
from ...ops.attention.tiled import tiled_attention
from ...ops.collectives import return_runs, ring_attention, send_runs
from ...ops.rank_local import rows_of
from ...ops.rules.node_factors import argument

aten = torch.ops.aten
QUERIES = 2  # the dim of positions in q, k and v
LONG = 1024  # positions from which on documents are tiles of their own: fewer are as fast with a mask


@dataclass(frozen=True)
class LowerAttention:
    """Before: attention(%q: S(2), %k: R, %v: R, scale=0.3, mask='causal')
    After:  %rows = rows_of(%q, ...);  %mask = ge(%rows, arange);  scaled_dot_product_attention(%q, %k, %v, %mask)
    or, where the mask takes more than ``tile_bytes``:  tiled_attention(%q, %k, %v, ...)

    ``strategies``: how the operator runs on each of ``axes``. ``balance``: whether ranks of a ring even out the work
    that causality and documents leave them. ``tile_bytes``: of the largest mask, and of a tile of what has none.
    ``on_host``: ids in the host's memory, which are read there. ``shared``: a call that all layers of a stage have in
    common.
    """

    builder: GraphBuilder
    axes: Sequence[Axis]
    strategies: Sequence[Strategy]
    balance: bool = True
    tile_bytes: int = TILE_BYTES
    on_host: Callable[[fx.Node], fx.Node] = lambda ids: ids
    shared: Callable[..., fx.Node] | None = None

    def __call__(self, node: fx.Node, given: Sequence[fx.Node]) -> fx.Node:
        """``node`` on local inputs, of which there are three to six."""
        q, k, v, *ids = given
        found = dict(zip([name for name in IDS if argument(node, name) is not None], ids, strict=True))
        scale, mask = argument(node, "scale"), argument(node, "mask")
        sight = Sight.parse(mask)
        call = self.builder.call
        rings = [a for a, s in zip(self.axes, self.strategies, strict=True) if s.exchanges]
        if rings:
            (axis,) = rings
            if axis.role == "time":
                raise CompileError("QN104", "keys cannot travel between microbatches", where=self.builder.where)
            read, plan = self._read(found), None
            runs = runs_of_rank(shape(q)[QUERIES])
            if self.balance and runs > 1 and (sight == Sight(causal=True) or "segments" in found):
                whole = axis.size * shape(q)[QUERIES]
                plan = (self.shared or call)(ring_plan, *read, mask, whole, axis.size, runs)
                q, k, v = (call(send_runs, x, axis.name, axis.size, QUERIES, plan) for x in (q, k, v))
            options = [*read, plan, scale, mask, self.tile_bytes]
            made = self.builder.getitem(call(ring_attention, q, axis.name, axis.size, k, v, *options), 0)
            return made if plan is None else call(return_runs, made, axis.name, axis.size, QUERIES, plan)
        grouped: dict[str, Any] = {"enable_gqa": True} if shape(q)[1] != shape(k)[1] else {}
        cuts = [
            (axis.name, axis.size, kind.parts, kind.unit)
            for axis, s in zip(self.axes, self.strategies, strict=True)
            if isinstance(kind := s.outputs[0], Shard) and kind.dim == QUERIES
        ]
        if not found and (sight == Sight() or (sight == Sight(causal=True) and not cuts)):
            return self._kernel(q, k, v, None, sight.causal, scale=scale, **grouped)
        whole = shape(node)[QUERIES]
        sizes = [shape(q)[0] if found else 1, shape(q)[QUERIES], shape(k)[QUERIES]]
        if sight == Sight() and found.keys() <= {"padding"}:
            sizes[1] = 1  # padding hides the same keys from every query
        # tiles know runs of positions: padding behind all of them goes on counting, in between it cannot
        padded = math.prod(shape(q)[QUERIES : QUERIES + 1] + tuple(size for _, size, *_ in cuts))
        runs = padded == whole or (len(cuts) == 1 and cuts[0][2] == 1)
        large = math.prod(sizes) * value(q).element_size() > self.tile_bytes
        if runs and (large or ("segments" in found and shape(k)[QUERIES] >= LONG)):
            whole, places = padded, [list(column) for column in zip(*cuts, strict=True)][:3] or [[], [], []]
            options = [*self._read(found), scale, mask, self.tile_bytes]
            return self.builder.getitem(call(tiled_attention, q, k, v, *options, whole, *places), 0)
        shown = self._mask(q, k, cuts, found, sight, whole)
        if grouped:  # with a mask, kernels want as many heads of keys as of queries
            k, v = (call(aten.repeat_interleave.self_int, x, shape(q)[1] // shape(k)[1], 1) for x in (k, v))
        blind = None
        if "padding" in found:
            blind = call(aten.logical_not.default, call(aten.any.dim, shown, -1, True))
            shown = call(aten.logical_or.default, shown, blind)
        out = self._kernel(q, k, v, shown, False, scale=scale)
        return out if blind is None else call(aten.masked_fill.Scalar, out, blind, 0.0)

    def _read(self, found: dict[str, fx.Node]) -> list[fx.Node | None]:
        return [self.on_host(found[name]) if name in found else None for name in IDS]

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
        sight: Sight,
        whole: int,
    ) -> fx.Node:
        """As :func:`quintnet_compiler.ops.attention.operator.visible`, for the queries that this rank has."""
        call, reshape, device = self.builder.call, self.builder.reshape, value(q).device
        count, keys = shape(q)[QUERIES], shape(k)[QUERIES]
        cols = call(aten.arange.default, keys, dtype=torch.int64, device=device)
        rows = call(aten.arange.default, count, dtype=torch.int64, device=device)
        if cuts:
            rows = call(rows_of, q, QUERIES, whole, *(list(column) for column in zip(*cuts, strict=True)))
        parts: list[fx.Node] = []
        if sight.causal or sight.window:
            behind = call(aten.sub.Tensor, reshape(rows, [count, 1]), cols)
            parts += [call(aten.ge.Scalar, behind, 0)] if sight.causal else []
            parts += [call(aten.lt.Scalar, behind, sight.window)] if sight.window else []
        if sight.chunk:
            mine, theirs = (call(aten.floor_divide.default, x, sight.chunk) for x in (rows, cols))
            parts.append(call(aten.eq.Tensor, reshape(mine, [count, 1]), theirs))

        def both(ids: fx.Node) -> tuple[fx.Node, fx.Node]:
            """Of queries and of keys, [rows, 1, queries, keys]."""
            mine = call(aten.index_select.default, ids, 1, rows) if cuts else ids
            batch = shape(ids)[0]
            return reshape(mine, [batch, 1, count, 1]), reshape(ids, [batch, 1, 1, keys])

        if "segments" in found:
            parts.append(call(aten.eq.Tensor, *both(found["segments"])))
        parts = [self._all(parts)] if parts else []
        if "groups" in found and parts:
            mine, theirs = both(found["groups"])
            together = self._all([call(aten.eq.Tensor, mine, theirs), call(aten.ge.Scalar, mine, 0)])
            parts = [call(aten.logical_or.default, parts[0], together)]
        if "padding" in found:
            parts.append(reshape(found["padding"], [shape(found["padding"])[0], 1, 1, keys]))
        return self._all(parts)

    def _all(self, parts: Sequence[fx.Node]) -> fx.Node:
        return reduce(lambda a, b: self.builder.call(aten.logical_and.default, a, b), parts)
