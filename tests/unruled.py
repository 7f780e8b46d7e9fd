"""An operator with a derivative and without a sharding rule."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("quintnet_tests::cubed", mutates_args=())
def cubed(x: Tensor) -> Tensor:
    return x**3


@cubed.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    made: Tensor = 3 * x.square() * grad
    return made


cubed.register_autograd(_backward, setup_context=_keep)


@torch.library.custom_op("quintnet_tests::heads", mutates_args=())
def heads(x: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [rows, heads, steps, width] of [rows, steps, 3 * heads * width]."""
    rows, steps, _ = x.shape
    parts = x.reshape(rows, steps, 3, count, -1).permute(2, 0, 3, 1, 4)
    return parts[0].contiguous(), parts[1].contiguous(), parts[2].contiguous()


@heads.register_fake
def _(x: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    rows, steps, wide = x.shape
    first, second, third = (x.new_empty([rows, count, steps, wide // 3 // count]) for _ in range(3))
    return first, second, third


def _joined(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
    return torch.stack([grad.transpose(1, 2) for grad in grads], 2).flatten(2), None


heads.register_autograd(_joined, setup_context=lambda ctx, inputs, output: None)
