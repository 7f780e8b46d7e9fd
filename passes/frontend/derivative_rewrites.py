"""How :mod:`.normalize` spells operators of a backward, which a model has where its forward differentiates."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ...core.annotations import shape, value
from ...ir.builder import GraphBuilder
from .norm_rewrites import NARROW_DTYPES
from .random_rewrites import Rewrite

aten = torch.ops.aten


def _convolution_backward(
    builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]
) -> list[fx.Node | None]:
    """The gradient of the input is a convolution with the same weight, transposed; that of the bias is a sum."""
    grad, x, weight, _, stride, padding, dilation, transposed, over, groups, wanted = args
    found: list[fx.Node | None] = [None] * 3
    if wanted[0]:
        more = [0] * len(stride)
        if not transposed:  # what a stride left over
            sizes = zip(shape(x)[2:], shape(grad)[2:], stride, padding, dilation, shape(weight)[2:], strict=True)
            more = [size - ((out - 1) * s - 2 * p + d * (k - 1) + 1) for size, out, s, p, d, k in sizes]
        target, back = aten.convolution.default, not transposed
        found[0] = builder.call(target, grad, weight, None, stride, padding, dilation, back, more, groups)
    if wanted[1]:
        given = (grad, x, weight, None, stride, padding, dilation, transposed, over, groups, [False, True, False])
        found[1] = builder.getitem(builder.call(node.target, *given), 1)  # type: ignore[arg-type]
    if wanted[2]:
        found[2] = builder.call(aten.sum.dim_IntList, grad, [0, *range(2, len(shape(grad)))])
    return found


def _layer_norm(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> list[fx.Node]:
    """The norm, and statistics that its backward reads: autograd has no derivative of those."""
    x, sizes, weight, bias, eps = args
    norm = builder.call(aten.layer_norm.default, x, sizes, weight, bias, eps)
    return [norm, *_statistics(builder, x, [-i - 1 for i in reversed(range(len(sizes)))], eps, keep=True)]


def _group_norm(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> list[fx.Node]:
    """Likewise: this operator takes sizes as numbers, which no layout could split."""
    x, weight, bias, rows, channels, size, groups, eps = args
    norm = builder.call(aten.group_norm.default, x, groups, weight, bias, eps)
    grouped = builder.reshape(x, [rows, groups, channels * size // groups])
    return [norm, *_statistics(builder, grouped, [2], eps, keep=False)]


def _statistics(builder: GraphBuilder, x: fx.Node, dims: list[int], eps: float, *, keep: bool) -> list[fx.Node]:
    """Mean and 1 / standard deviation; of values of 16 bits in float32, as PyTorch's kernels do."""
    wide = builder.call(aten._to_copy.default, x, dtype=torch.float32) if value(x).dtype in NARROW_DTYPES else x
    count = math.prod(shape(x)[dim] for dim in dims)
    mean = builder.call(aten.div.Scalar, builder.call(aten.sum.dim_IntList, wide, dims, keep), count)
    spread = builder.call(aten.var.correction, wide, dims, correction=0, keepdim=keep)
    return [mean, builder.call(aten.rsqrt.default, builder.call(aten.add.Scalar, spread, eps))]


def _log_sigmoid(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> list[fx.Node]:
    """The function, and what its backward reads on CPUs."""
    below = builder.call(aten.neg.default, builder.call(aten.abs.default, args[0]))
    return [builder.call(aten.log_sigmoid.default, args[0]), builder.call(aten.exp.default, below)]


def of_the_model(builder: GraphBuilder, target: Any, made: Any) -> Any:
    """What an operator made that the model itself calls: autograd has no derivative of what is there for a backward."""
    if target not in _FOR_BACKWARD:
        return made
    first, *rest = made
    return [first, *(builder.call(aten.detach.default, x) for x in rest)]


_FOR_BACKWARD = frozenset({aten.native_layer_norm.default, aten.log_sigmoid_forward.default})
DERIVATIVE_REWRITES: dict[Any, Rewrite] = {
    aten.convolution_backward.default: _convolution_backward,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_group_norm.default: _group_norm,
    aten.log_sigmoid_forward.default: _log_sigmoid,
}
