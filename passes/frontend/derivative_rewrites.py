"""Canonical forms of operators of a backward, which a model has if its forward differentiates."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ...core.annotations import shape, value
from ...ir.builder import GraphBuilder
from ...ops.filters_of_rows import grouped_convolution_weight
from .norm_rewrites import NARROW_DTYPES
from .random_rewrites import Rewrite

aten = torch.ops.aten


def _convolution_backward(
    builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]
) -> list[fx.Node | None]:
    """Emit the gradients apart: the input's as a transposed convolution, the bias's as a sum."""
    grad, x, weight, _, stride, padding, dilation, transposed, output_padding, groups, wanted = args
    gradients: list[fx.Node | None] = [None] * 3
    if wanted[0]:
        skipped = [0] * len(stride)  # elements at the end that the stride did not reach
        if not transposed:
            sizes = zip(shape(x)[2:], shape(grad)[2:], stride, padding, dilation, shape(weight)[2:], strict=True)
            skipped = [size - ((out - 1) * s - 2 * p + d * (k - 1) + 1) for size, out, s, p, d, k in sizes]
        options = (stride, padding, dilation, not transposed, skipped, groups)
        gradients[0] = builder.call(aten.convolution.default, grad, weight, None, *options)
    if wanted[1]:
        grouped = (_of_groups(builder, images, groups, 1) for images in (grad, x))
        filters = _of_groups(builder, weight, groups, 0)
        options_of_groups = (stride, padding, dilation, transposed, output_padding)
        of_groups = builder.call(grouped_convolution_weight, *grouped, filters, *options_of_groups)
        gradients[1] = builder.reshape(of_groups, shape(weight))
    if wanted[2]:
        gradients[2] = builder.call(aten.sum.dim_IntList, grad, [0, *range(2, len(shape(grad)))])
    return gradients


def _of_groups(builder: GraphBuilder, tensor: fx.Node, groups: int, dim: int) -> fx.Node:
    """Return a tensor with a dim for the groups in front of ``dim``, which has the channels of all of them."""
    sizes = shape(tensor)
    return builder.reshape(tensor, [*sizes[:dim], groups, sizes[dim] // groups, *sizes[dim + 1 :]])


def _layer_norm(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> list[fx.Node]:
    """Emit the norm, and the statistics that its backward reads, of which autograd has no derivative."""
    x, sizes, weight, bias, eps = args
    norm = builder.call(aten.layer_norm.default, x, sizes, weight, bias, eps)
    return [norm, *_statistics(builder, x, [-i - 1 for i in reversed(range(len(sizes)))], eps, keep=True)]


def _group_norm(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> list[fx.Node]:
    """Emit a group norm and its statistics: this operator takes sizes as numbers, which no layout could split."""
    x, weight, bias, rows, channels, size, groups, eps = args
    norm = builder.call(aten.group_norm.default, x, groups, weight, bias, eps)
    grouped = builder.reshape(x, [rows, groups, channels * size // groups])
    return [norm, *_statistics(builder, grouped, [2], eps, keep=False)]


def _statistics(builder: GraphBuilder, x: fx.Node, dims: list[int], eps: float, *, keep: bool) -> list[fx.Node]:
    """Return mean and 1 / standard deviation; of 16-bit values in float32, as PyTorch's kernels do."""
    wide = builder.call(aten._to_copy.default, x, dtype=torch.float32) if value(x).dtype in NARROW_DTYPES else x
    count = math.prod(shape(x)[dim] for dim in dims)
    mean = builder.call(aten.div.Scalar, builder.call(aten.sum.dim_IntList, wide, dims, keep), count)
    spread = builder.call(aten.var.correction, wide, dims, correction=0, keepdim=keep)
    return [mean, builder.call(aten.rsqrt.default, builder.call(aten.add.Scalar, spread, eps))]


def _log_sigmoid(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> list[fx.Node]:
    """Emit the function, and the value that its backward reads on CPUs."""
    below = builder.call(aten.neg.default, builder.call(aten.abs.default, args[0]))
    return [builder.call(aten.log_sigmoid.default, args[0]), builder.call(aten.exp.default, below)]


def detach_backward_values(builder: GraphBuilder, target: Any, results: Any) -> Any:
    """Detach the results of an operator that are for its backward: autograd has no derivative of them."""
    if target not in _FOR_BACKWARD:
        return results
    out, *for_backward = results
    return [out, *(builder.call(aten.detach.default, x) for x in for_backward)]


_FOR_BACKWARD = frozenset({aten.native_layer_norm.default, aten.log_sigmoid_forward.default})
DERIVATIVE_REWRITES: dict[Any, Rewrite] = {
    aten.convolution_backward.default: _convolution_backward,
    aten.native_layer_norm.default: _layer_norm,
    aten.native_group_norm.default: _group_norm,
    aten.log_sigmoid_forward.default: _log_sigmoid,
}
