"""Attention on one rank: a kernel of the device, with a mask where it needs one, tiles, or a ring of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
MIN_TILED_POSITIONS = 1024  # shorter documents are as fast with a mask as in tiles of their own


@dataclass(frozen=True)
class _AttentionCall:
    """An attention operator on local inputs.

    Attributes:
        node: the operator in the sharded program, with global shapes.
        q: queries, [batch, heads, positions, features]; ``k`` and ``v``: keys and values, alike.
        ids: which documents positions belong to, and the like, by name (:data:`IDS`).
        scale: what scores are multiplied by.
        mask: the text of which keys queries see; ``sight`` is what it says.
        splits: of each axis that splits queries by position: its name, size, parts and unit.
    """

    node: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    ids: Mapping[str, fx.Node]
    scale: Any
    mask: Any
    sight: Sight
    splits: Sequence[tuple[str, int, int, int]]

    @property
    def query_positions(self) -> int:
        """Return the number of positions of queries on this rank."""
        return shape(self.q)[QUERIES]

    @property
    def key_positions(self) -> int:
        """Return the number of positions of keys on this rank."""
        return shape(self.k)[QUERIES]

    @property
    def groups(self) -> int:
        """Return the number of heads of queries for each head of keys."""
        return shape(self.q)[1] // shape(self.k)[1]

    @property
    def groups_differ(self) -> bool:
        """Return whether keys have another number of heads than queries (GQA)."""
        return shape(self.q)[1] != shape(self.k)[1]

    @property
    def needs_no_mask(self) -> bool:
        """Return whether a kernel needs no mask: every query sees all keys, or all up to its position."""
        causal = self.sight == Sight(causal=True) and not self.splits
        return not self.ids and (self.sight == Sight() or causal)

    @property
    def padded_positions(self) -> int:
        """Return the positions of queries on all ranks, with padding."""
        return math.prod((self.query_positions, *(size for _, size, *_ in self.splits)))

    def mask_bytes(self) -> int:
        """Return the size of a mask in the dtype of queries."""
        batch = shape(self.q)[0] if self.ids else 1
        hides_keys_alike = self.sight == Sight() and self.ids.keys() <= {"padding"}
        queries = 1 if hides_keys_alike else self.query_positions
        return batch * queries * self.key_positions * value(self.q).element_size()


@dataclass(frozen=True)
class LowerAttention:
    """Emit attention on one rank.

    Before: attention(%q: S(2), %k: R, %v: R, scale=0.3, mask='causal')
    After:  %rows = rows_of(%q, ...);  %mask = ge(%rows, arange);  scaled_dot_product_attention(%q, %k, %v, %mask)
    or, where the mask takes more than ``tile_bytes``:  tiled_attention(%q, %k, %v, ...)

    Attributes:
        strategies: how the operator runs on each of ``axes``.
        balance: whether ranks of a ring even out the work that causality and documents leave them.
        tile_bytes: the size of the largest mask, and of a tile of attention without one.
        on_host: returns the copy of ids in the host's memory.
        shared: returns a call that all layers of a stage share.
    """

    builder: GraphBuilder
    axes: Sequence[Axis]
    strategies: Sequence[Strategy]
    balance: bool = True
    tile_bytes: int = TILE_BYTES
    on_host: Callable[[fx.Node], fx.Node] = lambda ids: ids
    shared: Callable[..., fx.Node] | None = None

    def __call__(self, node: fx.Node, inputs: Sequence[fx.Node]) -> fx.Node:
        """Emit ``node`` on its three to six local inputs."""
        call = self._call(node, inputs)
        rings = [axis for axis, s in zip(self.axes, self.strategies, strict=True) if s.exchanges]
        if rings:
            (axis,) = rings
            return self._ring(call, axis)
        if call.needs_no_mask:
            grouped: dict[str, Any] = {"enable_gqa": True} if call.groups_differ else {}
            return self._kernel(call.q, call.k, call.v, None, call.sight.causal, scale=call.scale, **grouped)
        if self._needs_tiles(call):
            return self._tiled(call)
        return self._masked(call)

    def _call(self, node: fx.Node, inputs: Sequence[fx.Node]) -> _AttentionCall:
        q, k, v, *id_nodes = inputs
        names = [name for name in IDS if argument(node, name) is not None]
        mask = argument(node, "mask")
        splits = [
            (axis.name, axis.size, kind.parts, kind.unit)
            for axis, s in zip(self.axes, self.strategies, strict=True)
            if isinstance(kind := s.outputs[0], Shard) and kind.dim == QUERIES
        ]
        ids = dict(zip(names, id_nodes, strict=True))
        return _AttentionCall(node, q, k, v, ids, argument(node, "scale"), mask, Sight.parse(mask), splits)

    def _ring(self, attention: _AttentionCall, axis: Axis) -> fx.Node:
        """Emit ring attention: keys and values travel around ``axis``.

        Raises:
            CompileError: if the ranks of the ring are microbatches.
        """
        if axis.role == "time":
            raise CompileError("QN104", "keys cannot travel between microbatches", where=self.builder.where)
        call, q, k, v = self.builder.call, attention.q, attention.k, attention.v
        ids, plan = self._ids_on_host(attention), None
        runs = runs_of_rank(attention.query_positions)
        uneven = attention.sight == Sight(causal=True) or "segments" in attention.ids
        if self.balance and runs > 1 and uneven:
            positions = axis.size * attention.query_positions
            plan = (self.shared or call)(ring_plan, *ids, attention.mask, positions, axis.size, runs)
            q, k, v = (call(send_runs, x, axis.name, axis.size, QUERIES, plan) for x in (q, k, v))
        options = [*ids, plan, attention.scale, attention.mask, self.tile_bytes]
        out = self.builder.getitem(call(ring_attention, q, axis.name, axis.size, k, v, *options), 0)
        return out if plan is None else call(return_runs, out, axis.name, axis.size, QUERIES, plan)

    def _needs_tiles(self, attention: _AttentionCall) -> bool:
        """Return whether to compute tiles: the mask is large, or documents are long enough to skip tiles between them.

        Tiles know runs of positions. Padding after all of them continues the count; padding in between cannot.
        """
        splits = attention.splits
        unpadded = attention.padded_positions == shape(attention.node)[QUERIES]
        in_runs = unpadded or (len(splits) == 1 and splits[0][2] == 1)
        long_documents = "segments" in attention.ids and attention.key_positions >= MIN_TILED_POSITIONS
        return in_runs and (attention.mask_bytes() > self.tile_bytes or long_documents)

    def _tiled(self, attention: _AttentionCall) -> fx.Node:
        positions = attention.padded_positions
        splits = [list(column) for column in zip(*attention.splits, strict=True)][:3] or [[], [], []]
        options = [*self._ids_on_host(attention), attention.scale, attention.mask, self.tile_bytes]
        out = self.builder.call(tiled_attention, attention.q, attention.k, attention.v, *options, positions, *splits)
        return self.builder.getitem(out, 0)

    def _masked(self, attention: _AttentionCall) -> fx.Node:
        """Emit a kernel with a mask. Queries that see no key get zeros."""
        call, k, v = self.builder.call, attention.k, attention.v
        mask = self._mask(attention)
        if attention.groups_differ:  # with a mask, kernels want as many heads of keys as of queries
            k, v = (call(aten.repeat_interleave.self_int, x, attention.groups, 1) for x in (k, v))
        blind = None
        if "padding" in attention.ids:
            blind = call(aten.logical_not.default, call(aten.any.dim, mask, -1, True))
            mask = call(aten.logical_or.default, mask, blind)
        out = self._kernel(attention.q, k, v, mask, False, scale=attention.scale)
        return out if blind is None else call(aten.masked_fill.Scalar, out, blind, 0.0)

    def _ids_on_host(self, attention: _AttentionCall) -> list[fx.Node | None]:
        return [self.on_host(attention.ids[name]) if name in attention.ids else None for name in IDS]

    def _kernel(self, q: fx.Node, k: fx.Node, v: fx.Node, mask: fx.Node | None, causal: Any, **options: Any) -> fx.Node:
        """Emit a kernel with queries, keys and values padded to one width.

        Flash kernels take one width; others would write out the scores. Zeros add nothing to a score, and are cut off
        the result.
        """
        call, width = self.builder.call, shape(v)[-1]
        widest = max(width, shape(q)[-1])
        q, k, v = (
            call(aten.constant_pad_nd.default, x, [0, widest - shape(x)[-1]]) if shape(x)[-1] < widest else x
            for x in (q, k, v)
        )
        out = call(aten.scaled_dot_product_attention.default, q, k, v, mask, 0.0, causal, **options)
        return call(aten.slice.Tensor, out, 3, 0, width) if width < widest else out

    def _mask(self, attention: _AttentionCall) -> fx.Node:
        """Emit :func:`quintnet_compiler.ops.attention.operator.visible` for the queries of this rank."""
        call, ids = self.builder.call, attention.ids
        cols = call(aten.arange.default, attention.key_positions, dtype=torch.int64, device=value(attention.q).device)
        rows = self._rows(attention)
        conditions = self._position_conditions(attention, rows, cols)
        if "segments" in ids:
            conditions.append(call(aten.eq.Tensor, *self._ids_of_pairs(attention, ids["segments"], rows)))
        conditions = [self._all(conditions)] if conditions else []
        if "groups" in ids and conditions:
            of_queries, of_keys = self._ids_of_pairs(attention, ids["groups"], rows)
            together = self._all([call(aten.eq.Tensor, of_queries, of_keys), call(aten.ge.Scalar, of_queries, 0)])
            conditions = [call(aten.logical_or.default, conditions[0], together)]
        if "padding" in ids:
            padding = ids["padding"]
            conditions.append(self.builder.reshape(padding, [shape(padding)[0], 1, 1, attention.key_positions]))
        return self._all(conditions)

    def _rows(self, attention: _AttentionCall) -> fx.Node:
        """Return the positions of queries, [queries]."""
        call, positions = self.builder.call, shape(attention.node)[QUERIES]
        rows = call(aten.arange.default, attention.query_positions, dtype=torch.int64, device=value(attention.q).device)
        if attention.splits:
            columns = (list(column) for column in zip(*attention.splits, strict=True))
            rows = call(rows_of, attention.q, QUERIES, positions, *columns)
        return rows

    def _position_conditions(self, attention: _AttentionCall, rows: fx.Node, cols: fx.Node) -> list[fx.Node]:
        """Return masks [queries, keys] of causality, of a window and of chunks."""
        call, reshape, sight, count = (
            self.builder.call,
            self.builder.reshape,
            attention.sight,
            attention.query_positions,
        )
        conditions: list[fx.Node] = []
        if sight.causal or sight.window:
            distance = call(aten.sub.Tensor, reshape(rows, [count, 1]), cols)
            conditions += [call(aten.ge.Scalar, distance, 0)] if sight.causal else []
            conditions += [call(aten.lt.Scalar, distance, sight.window)] if sight.window else []
        if sight.chunk:
            row_chunks, col_chunks = (call(aten.floor_divide.default, x, sight.chunk) for x in (rows, cols))
            conditions.append(call(aten.eq.Tensor, reshape(row_chunks, [count, 1]), col_chunks))
        return conditions

    def _ids_of_pairs(self, attention: _AttentionCall, ids: fx.Node, rows: fx.Node) -> tuple[fx.Node, fx.Node]:
        """Return the ids of queries and of keys, which broadcast to [batch, 1, queries, keys]."""
        of_queries = self.builder.call(aten.index_select.default, ids, 1, rows) if attention.splits else ids
        batch, reshape = shape(ids)[0], self.builder.reshape
        return (
            reshape(of_queries, [batch, 1, attention.query_positions, 1]),
            reshape(ids, [batch, 1, 1, attention.key_positions]),
        )

    def _all(self, conditions: Sequence[fx.Node]) -> fx.Node:
        return reduce(lambda a, b: self.builder.call(aten.logical_and.default, a, b), conditions)
