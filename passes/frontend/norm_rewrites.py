"""How :mod:`.normalize` spells batch norms in training: sums over rows, which data ranks add up."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from ...compat.torch import schema
from ...core.annotations import shape, value
from ...ir.builder import GraphBuilder

aten = torch.ops.aten


def instance_norm(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> fx.Node:
    """With running statistics in evaluation it is a batch norm of these: each element on its own."""
    x, weight, bias, mean, variance, of_inputs, momentum, eps = args[:8]
    if of_inputs or mean is None:
        return builder.call(node.target, *args, **kwargs)  # type: ignore[arg-type]
    frozen = aten._native_batch_norm_legit_no_training.default
    return builder.getitem(builder.call(frozen, x, weight, bias, mean, variance, momentum, eps), 0)


NARROW = (torch.float16, torch.bfloat16)


def batch_norm(builder: GraphBuilder, node: fx.Node, args: list[Any], kwargs: dict[str, Any]) -> list[fx.Node]:
    """The result, mean and 1 / standard deviation of each channel, and (where they are kept) the new running statistics
    (Ioffe and Szegedy 2015). The result alone has a gradient. Values of 16 bits are summed in float32, as PyTorch's
    kernels do.

    Raises:
        ValueError: as PyTorch does, for one value per channel.
    """
    call = builder.call
    names = [one.name for one in schema(node.target).arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    x, weight, bias = given["input"], given.get("weight"), given.get("bias")
    running = [given[name] for name in ("running_mean", "running_var") if name in given]
    momentum, eps, dtype = given["momentum"], given["eps"], value(x).dtype
    if not given["training"]:
        made = call(aten._native_batch_norm_legit_no_training.default, x, weight, bias, *running, momentum, eps)
        return [*(builder.getitem(made, i) for i in range(3)), *running]
    wide = call(aten._to_copy.default, x, dtype=torch.float32) if dtype in NARROW else x
    dims = [d for d in range(len(shape(x))) if d != 1]
    channel = [n if d == 1 else 1 for d, n in enumerate(shape(x))]
    count = math.prod(shape(x)[d] for d in dims)
    if count == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {tuple(shape(x))}")
    mean = call(aten.div.Scalar, call(aten.sum.dim_IntList, wide, dims, True), count)
    centred = call(aten.sub.Tensor, wide, mean)
    squares = call(aten.sum.dim_IntList, call(aten.mul.Tensor, centred, centred), dims, True)
    scale = call(aten.rsqrt.default, call(aten.add.Scalar, call(aten.div.Scalar, squares, count), eps))
    out = call(aten.mul.Tensor, centred, scale)
    for target, factor in ((aten.mul.Tensor, weight), (aten.add.Tensor, bias)):
        out = out if factor is None else call(target, out, builder.reshape(factor, channel))
    out = out if value(out).dtype is dtype else call(aten._to_copy.default, out, dtype=dtype)
    unbiased = call(aten.div.Scalar, squares, count - 1)
    kept = [builder.reshape(call(aten.detach.default, one), channel[1:2]) for one in (mean, unbiased, scale)]
    new = [_averaged(builder, old, one, momentum) for old, one in zip(running, kept, strict=False)]
    return [out, kept[0], kept[2], *new]


def _averaged(builder: GraphBuilder, old: fx.Node, new: fx.Node, momentum: float) -> fx.Node:
    """The moving average, with weight ``momentum`` for what is new."""
    kept = builder.call(aten.mul.Scalar, old, 1 - momentum)
    return builder.call(aten.add.Tensor, kept, builder.call(aten.mul.Scalar, new, momentum))
