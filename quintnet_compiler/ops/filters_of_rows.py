"""Convolutions of which each row has filters of its own, as an operator with a dim for them.

``F.conv2d(x.reshape(1, rows * channels, h, w), filters, groups=rows)`` is how such convolutions are written for one
device (dynamic filters, modulated convolutions, https://arxiv.org/abs/1912.04958, equations 1 to 3). The number of
groups is an argument there, which would have to be another one on each rank. Here it is the size of a dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .define import define_operator, differentiate

aten = torch.ops.aten
_OPTIONS = "int[] stride, int[] padding, int[] dilation, bool transposed, int[] output_padding"


def _convolved(x: Tensor, weight: Tensor, *options: Any) -> Tensor:
    groups = x.shape[1]
    out: Tensor = aten.convolution(x.flatten(1, 2), weight.flatten(0, 1), None, *options, groups)
    return out.reshape(x.shape[0], groups, -1, *out.shape[2:])


def _of_weight(grad: Tensor, x: Tensor, weight: Tensor, *options: Any) -> Tensor:
    tensors = grad.flatten(1, 2), x.flatten(1, 2), weight.flatten(0, 1)
    gradient: Tensor = aten.convolution_backward(*tensors, None, *options, x.shape[1], [False, True, False])[1]
    return gradient.reshape(weight.shape)


# of images [images, groups, inputs, *space] and filters [groups, outputs, inputs, *kernel] (of a transposed
# convolution: [groups, inputs, outputs, *kernel]), images [images, groups, outputs, *space]
grouped_convolution = define_operator(
    f"grouped_convolution(Tensor x, Tensor weight, {_OPTIONS}) -> Tensor", _convolved, _convolved
)
# the gradient of the filters, of which the sizes alone are read
grouped_convolution_weight = define_operator(
    f"grouped_convolution_weight(Tensor grad, Tensor x, Tensor weight, {_OPTIONS}) -> Tensor",
    lambda grad, x, weight, *options: weight.new_empty(weight.shape),
    _of_weight,
)


def _of_x(grad: Tensor, x: Tensor, weight: Tensor, *options: Any) -> Tensor:
    """Return the gradient of the images: a convolution with the same filters, transposed."""
    stride, padding, dilation, transposed, _ = options
    rest = [0] * len(stride)
    if not transposed:  # what a stride left over
        sizes = zip(x.shape[3:], grad.shape[3:], stride, padding, dilation, weight.shape[3:], strict=True)
        rest = [size - ((out - 1) * s - 2 * p + d * (k - 1) + 1) for size, out, s, p, d, k in sizes]
    gradient: Tensor = grouped_convolution(grad, weight, stride, padding, dilation, not transposed, rest)
    return gradient


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*(x for x in inputs if isinstance(x, Tensor)))
    ctx.options = [x for x in inputs if not isinstance(x, Tensor)]


def _backward(ctx: Any, grad: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    of_weight = grouped_convolution_weight(grad, x, weight, *ctx.options)
    return (_of_x(grad, x, weight, *ctx.options), of_weight, *[None] * 5)


def _backward_of_weight(ctx: Any, arriving: Tensor) -> Any:
    grad, x, _ = ctx.saved_tensors
    of_grad = grouped_convolution(x, arriving, *ctx.options)
    return (of_grad, _of_x(grad, x, arriving, *ctx.options), None, *[None] * 5)


differentiate(grouped_convolution, _keep, _backward)
differentiate(grouped_convolution_weight, _keep, _backward_of_weight)
