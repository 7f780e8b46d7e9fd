"""Canonical form of batch norms in training: sums over rows, which ranks with different rows add up."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ...compat.torch import schema
from ...core.annotations import shape, value
from ...ir.builder import GraphBuilder

aten = torch.ops.aten


def emit_instance_norm(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """Emit an instance norm. With running statistics in evaluation it is a batch norm of these: elementwise."""
    x, weight, bias, mean, variance, of_inputs, momentum, eps = args[:8]
    if of_inputs or mean is None:
        return builder.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
    frozen = aten._native_batch_norm_legit_no_training.default
    return builder.getitem(builder.call(frozen, x, weight, bias, mean, variance, momentum, eps), 0)


NARROW_DTYPES = (torch.float16, torch.bfloat16)


def emit_batch_norm(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> list[fx.Node]:
    """Emit the result, mean and 1 / standard deviation of each channel, and new running statistics if there are any.

    The result alone has a gradient. 16-bit values are summed in float32, as PyTorch's kernels do (Ioffe and Szegedy
    2015).

    Raises:
        ValueError: as PyTorch does, for one value per channel.
    """
    call = builder.call
    names = [argument.name for argument in schema(node.target).arguments]
    arguments = dict(zip(names, args, strict=False)) | kwargs
    x, weight, bias = arguments["input"], arguments.get("weight"), arguments.get("bias")
    running = [arguments[name] for name in ("running_mean", "running_var") if name in arguments]
    momentum, eps = arguments["momentum"], arguments["eps"]
    if not arguments["training"]:
        results = call(aten._native_batch_norm_legit_no_training.default, x, weight, bias, *running, momentum, eps)
        return [*(builder.getitem(results, i) for i in range(3)), *running]
    wide = call(aten._to_copy.default, x, dtype=torch.float32) if value(x).dtype in NARROW_DTYPES else x
    dims, channels = [d for d in range(len(shape(x))) if d != 1], shape(x)[1]
    count = math.prod(shape(x)[d] for d in dims)
    if count == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(shape(x))}")
    mean = call(aten.div.Scalar, call(aten.sum.dim_IntList, wide, dims, True), count)
    centred = call(aten.sub.Tensor, wide, mean)
    squares = call(aten.sum.dim_IntList, call(aten.mul.Tensor, centred, centred), dims, True)
    scale = call(aten.rsqrt.default, call(aten.add.Scalar, call(aten.div.Scalar, squares, count), eps))
    out = _affine(builder, call(aten.mul.Tensor, centred, scale), weight, bias, value(x).dtype)
    unbiased = call(aten.div.Scalar, squares, count - 1)
    batch_mean, batch_variance, batch_scale = (
        builder.reshape(call(aten.detach.default, statistic), [channels]) for statistic in (mean, unbiased, scale)
    )
    new_statistics = zip(running, (batch_mean, batch_variance), strict=False)
    new_running = [_averaged(builder, old, new, momentum) for old, new in new_statistics]
    return [out, batch_mean, batch_scale, *new_running]


def _affine(
    builder: GraphBuilder, x: fx.Node, weight: fx.Node | None, bias: fx.Node | None, dtype: torch.dtype
) -> fx.Node:
    """Return ``x`` times a weight of each channel plus a bias, in ``dtype``."""
    channel = [n if d == 1 else 1 for d, n in enumerate(shape(x))]
    for target, factor in ((aten.mul.Tensor, weight), (aten.add.Tensor, bias)):
        x = x if factor is None else builder.call(target, x, builder.reshape(factor, channel))
    return x if value(x).dtype is dtype else builder.call(aten._to_copy.default, x, dtype=dtype)


def _averaged(builder: GraphBuilder, old: fx.Node, new: fx.Node, momentum: float) -> fx.Node:
    """Return the moving average, in which ``new`` has weight ``momentum``."""
    remaining = builder.call(aten.mul.Scalar, old, 1 - momentum)
    return builder.call(aten.add.Tensor, remaining, builder.call(aten.mul.Scalar, new, momentum))
