"""How :mod:`.normalize` spells bags of embeddings of equal length: rows of a table, added up for each bag."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from ...core.annotations import shape, value
from ...core.precision import widened
from ...ir.builder import GraphBuilder
from ..lowering.reductions import cast

aten = torch.ops.aten
_SUM, _MEAN, _MAX = range(3)


def embedding_bag(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """EmbeddingBag of ids [bags, length], which torch flattens: each bag is a row. Bags of several lengths, a largest
    and gradients scaled by frequency stay the operator that they are."""
    given: list[Any] = args + [None] * (9 - len(args))
    weight, ids, offsets, by_frequency, mode, sparse, scales, last, padding = given
    length = _length(offsets, shape(ids)[0]) if not last else None
    padded = padding is not None and padding >= 0
    alone = all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)
    if length is None or by_frequency or sparse or not alone:
        return builder.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
    call, dtype = builder.call, value(weight).dtype
    ids = builder.reshape(ids, [shape(ids)[0] // length, length])
    rows = call(aten.embedding.default, weight, ids)
    if mode == _MAX:
        return [_largest(builder, rows, call(aten.ne.Scalar, ids, padding) if padded else None)]
    rows = cast(builder, rows, widened(dtype))
    if scales is not None:
        rows = call(aten.mul.Tensor, rows, builder.reshape(scales, [*shape(ids), 1]))
    counted: fx.Node | None = None
    if padded:
        counted = call(aten.ne.Scalar, ids, padding)
        rows = call(aten.where.ScalarOther, builder.reshape(counted, [*shape(ids), 1]), rows, 0.0)
    total = call(aten.sum.dim_IntList, rows, [1])
    if mode == _MEAN and counted is None:
        total = call(aten.div.Scalar, total, length)
    elif mode == _MEAN:
        count = call(aten.sum.dim_IntList, cast(builder, counted, value(total).dtype), [1], True)  # type: ignore[arg-type]
        total = call(aten.div.Tensor, total, call(aten.clamp_min.default, count, 1))
    return [cast(builder, total, dtype)]


def _largest(builder: GraphBuilder, rows: fx.Node, counted: fx.Node | None) -> fx.Node:
    """The largest values of each bag, among rows that are ``counted``; zeros where none is."""
    call = builder.call
    if counted is None:
        return builder.getitem(call(aten.max.dim, rows, 1), 0)
    count = [*shape(counted), 1]
    rows = call(aten.where.ScalarOther, builder.reshape(counted, count), rows, -math.inf)
    some = call(aten.any.dim, counted, 1, True)
    return call(aten.where.ScalarOther, some, builder.getitem(call(aten.max.dim, rows, 1), 0), 0.0)


def _length(offsets: fx.Node, ids: int) -> int | None:
    """The length of each bag, where all have the same."""
    if offsets.target is not aten.arange.start_step:
        return None
    start, end, step = offsets.args[:3]
    return int(step) if start == 0 and end == ids and ids % step == 0 else None  # type: ignore[arg-type,operator]
