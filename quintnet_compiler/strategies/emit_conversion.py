"""Conversions as collectives, and the dtype in which each sums the values of ranks."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ..core.annotations import copied_from, leaf, value
from ..core.precision import Precision
from ..core.sharding import AxisType, gradient
from ..ir.builder import GraphBuilder
from ..ir.program import LocalProgram
from ..ops.catalog import op_spec
from ..ops.collectives import all_reduce, lower_conversion, reduce_scatter
from ..ops.rank_local import loss_scale

aten = torch.ops.aten


def parameter_conversions(local: LocalProgram) -> dict[fx.Node, fx.Node]:
    """Return the conversions of parameters, and of copies of parameters, each with its parameter."""
    parameters: dict[fx.Node, fx.Node] = {}
    for node in local.graph.nodes:
        if op_spec(node).converts:
            (source,) = node.all_input_nodes
            stored = parameters.get(source, copied_from(source) or source)
            stored_leaf = leaf(stored)
            if stored_leaf is not None and stored_leaf.kind == "parameter":
                parameters[node] = stored
    return parameters


def emit_conversion(
    builder: GraphBuilder,
    x: fx.Node,
    axis: str,
    size: int,
    source: AxisType,
    target: AxisType,
    precision: Precision,
    *,
    stored: bool = False,
) -> fx.Node:
    """Return ``x`` converted from type ``source`` to ``target``.

    Sums over ranks have the dtype that ``precision`` gives values. ``stored``: see
    :func:`..ops.collectives.lower_conversion`.
    """
    op, dims = lower_conversion(source, target, stored=stored)
    if op is None:
        return x
    dtype = value(x).dtype
    wide = precision.summed(dtype) if op in (all_reduce, reduce_scatter) else dtype
    converted = builder.call(op, cast(builder, x, wide), axis, size, *dims)
    return cast(builder, converted, dtype)


def emit_conversion_backward(
    builder: GraphBuilder,
    x: fx.Node,
    node: fx.Node,
    source: AxisType,
    target: AxisType,
    parameter: fx.Node | None,
    precision: Precision,
) -> fx.Node:
    """Return the transpose of the conversion ``node`` from ``source`` to ``target``, applied to the gradient ``x``.

    A parameter's gradient is summed in the dtype that ``precision`` gives it, and keeps that.
    """
    axis, size = str(node.args[1]), int(node.args[2])  # type: ignore[arg-type]
    old_type, new_type = gradient(target), gradient(source)
    if parameter is None:
        return emit_conversion(builder, x, axis, size, old_type, new_type, precision)
    op, dims = lower_conversion(old_type, new_type)
    if op is None:
        return x
    if op in (all_reduce, reduce_scatter):
        x = cast(builder, x, precision.reduced(value(parameter).dtype))
    return builder.call(op, x, axis, size, *dims)


def loss_seed(builder: GraphBuilder, loss: Tensor, precision: Precision) -> fx.Node:
    """Return the gradient of the loss: 1, or the loss scale of fp16."""
    seed = builder.call(aten.ones.default, list(loss.shape), dtype=loss.dtype, device=loss.device)
    return builder.call(loss_scale, seed) if precision.scale is not None else seed


def cast(builder: GraphBuilder, x: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Return ``x`` in ``dtype``: itself, if it has that."""
    return x if value(x).dtype is dtype else builder.call(aten._to_copy.default, x, dtype=dtype)
