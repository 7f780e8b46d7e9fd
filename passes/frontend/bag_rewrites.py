"""Canonical form of bags of embeddings of equal length: rows of a table, summed for each bag."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ...core.annotations import is_getitem, shape, value
from ...core.precision import widened
from ...ir.builder import GraphBuilder
from ...strategies.emit_conversion import cast

aten = torch.ops.aten
_SUM, _MEAN, _MAX = range(3)


def embedding_bag(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Emit EmbeddingBag of ids [bags, length], which torch flattens, with a row for each bag.

    Bags of several lengths, a last offset, and gradients scaled by frequency leave the operator as it is.
    """
    padded_args: list[Any] = args + [None] * (9 - len(args))
    weight, ids, offsets, by_frequency, mode, sparse, scales, last, padding = padded_args
    length = _length(offsets, shape(ids)[0]) if not last else None
    only_result = all(is_getitem(user) and user.args[1] == 0 for user in node.users)
    if length is None or by_frequency or sparse or not only_result:
        return builder.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
    ids = builder.reshape(ids, [shape(ids)[0] // length, length])
    rows = builder.call(aten.embedding.default, weight, ids)
    if padding is None or padding < 0:
        padding = None
    if mode == _MAX:
        return [_largest(builder, rows, None if padding is None else builder.call(aten.ne.Scalar, ids, padding))]
    return [_sum_or_mean(builder, rows, ids, scales, padding, mode)]


def _sum_or_mean(
    builder: GraphBuilder, rows: fx.Node, ids: fx.Node, scales: fx.Node | None, padding: int | None, mode: int
) -> fx.Node:
    """Return the sum or mean of the rows of each bag, [bags, features]. ``padding``: the id that does not count."""
    call, dtype = builder.call, value(rows).dtype
    rows = cast(builder, rows, widened(dtype))
    if scales is not None:
        rows = call(aten.mul.Tensor, rows, builder.reshape(scales, [*shape(ids), 1]))
    counted: fx.Node | None = None
    if padding is not None:
        counted = call(aten.ne.Scalar, ids, padding)
        rows = call(aten.where.ScalarOther, builder.reshape(counted, [*shape(ids), 1]), rows, 0.0)
    total = call(aten.sum.dim_IntList, rows, [1])
    if mode == _MEAN and counted is None:
        total = call(aten.div.Scalar, total, shape(ids)[1])
    elif mode == _MEAN:
        count = call(aten.sum.dim_IntList, cast(builder, counted, value(total).dtype), [1], True)  # type: ignore[arg-type]
        total = call(aten.div.Tensor, total, call(aten.clamp_min.default, count, 1))
    return cast(builder, total, dtype)


def _largest(builder: GraphBuilder, rows: fx.Node, counted: fx.Node | None) -> fx.Node:
    """Return the largest values of each bag among rows that are ``counted``; zeros if none is."""
    call = builder.call
    if counted is None:
        return builder.getitem(call(aten.max.dim, rows, 1), 0)
    mask = builder.reshape(counted, [*shape(counted), 1])
    rows = call(aten.where.ScalarOther, mask, rows, -math.inf)
    any_counted = call(aten.any.dim, counted, 1, True)
    return call(aten.where.ScalarOther, any_counted, builder.getitem(call(aten.max.dim, rows, 1), 0), 0.0)


def _length(offsets: fx.Node, ids: int) -> int | None:
    """Return the length of each bag, or None if lengths differ."""
    if offsets.target is not aten.arange.start_step:
        return None
    start, end, step = offsets.args[:3]
    return int(step) if start == 0 and end == ids and ids % step == 0 else None  # type: ignore[arg-type,operator]
