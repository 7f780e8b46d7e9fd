"""Conversions as plain communication, and the dtype in which each adds up what ranks have."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ...core.annotations import copied_from, leaf, value
from ...core.precision import Precision
from ...core.sharding import AxisType, gradient
from ...ir.builder import GraphBuilder
from ...ir.program import LocalProgram
from ...ops.collectives import all_reduce, convert, lower_conversion, reduce_scatter
from ...ops.rank_local import loss_scale

aten = torch.ops.aten


def of_parameters(local: LocalProgram) -> dict[fx.Node, fx.Node]:
    """Conversions of parameters (and of copies of them) -> the parameter."""
    found: dict[fx.Node, fx.Node] = {}
    for node in local.graph.nodes:
        if node.target is convert:
            (source,) = node.all_input_nodes
            start = found.get(source, copied_from(source) or source)
            known = leaf(start)
            if known is not None and known.kind == "parameter":
                found[node] = start
    return found


def move(
    builder: GraphBuilder,
    x: fx.Node,
    axis: str,
    size: int,
    before: AxisType,
    after: AxisType,
    precision: Precision,
    *,
    stored: bool = False,
) -> fx.Node:
    """``x`` converted. Where ranks add up, they do in the dtype that ``precision`` says of values. ``stored``: see
    :func:`...ops.collectives.lower_conversion`."""
    op, dims = lower_conversion(before, after, stored=stored)
    if op is None:
        return x
    dtype = value(x).dtype
    wide = precision.summed(dtype) if op in (all_reduce, reduce_scatter) else dtype
    made = builder.call(op, cast(builder, x, wide), axis, size, *dims)
    return cast(builder, made, dtype)


def move_back(
    builder: GraphBuilder,
    x: fx.Node,
    node: fx.Node,
    source: AxisType,
    target: AxisType,
    parameter: fx.Node | None,
    precision: Precision,
) -> fx.Node:
    """The transpose of the conversion ``node`` from ``source`` to ``target``, of the gradient ``x``. A parameter's is
    added up in the dtype of its gradient, and stays in it."""
    axis, size = str(node.args[1]), int(node.args[2])  # type: ignore[arg-type]
    before, after = gradient(target), gradient(source)
    if parameter is None:
        return move(builder, x, axis, size, before, after, precision)
    op, dims = lower_conversion(before, after)
    if op is None:
        return x
    if op in (all_reduce, reduce_scatter):
        x = cast(builder, x, precision.reduced(value(parameter).dtype))
    return builder.call(op, x, axis, size, *dims)


def seed_of(builder: GraphBuilder, loss: Tensor, precision: Precision) -> fx.Node:
    """The gradient of the loss: 1, or the factor that keeps gradients from vanishing where exponents are short."""
    one = builder.call(aten.ones.default, list(loss.shape), dtype=loss.dtype, device=loss.device)
    return builder.call(loss_scale, one) if precision.scale is not None else one


def cast(builder: GraphBuilder, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    return x if value(x).dtype is dtype else builder.call(aten._to_copy.default, x, dtype=dtype)
