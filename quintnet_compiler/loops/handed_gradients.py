"""A loss with known gradients, as a value that autograd differentiates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

Gradients = Sequence[tuple[nn.Parameter, Tensor]]


def differentiable(loss: Tensor, gradients: Gradients) -> Tensor:
    """Return ``loss`` as a value whose backward adds these gradients to the parameters' ``grad``.

    ``(f * differentiable(loss, gradients)).backward()`` adds ``f`` times the gradients, as the backward of the
    computation of ``loss`` would.
    """
    anchor = torch.zeros((), dtype=loss.dtype, device=loss.device, requires_grad=True)
    result: Tensor = _Handed.apply(anchor, loss, gradients)  # type: ignore[no-untyped-call]
    return result


class _Handed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, loss: Tensor, gradients: Gradients) -> Tensor:
        ctx.gradients = gradients
        return loss.detach().clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, arriving: Tensor) -> tuple[None, None, None]:
        factor = float(arriving)
        for parameter, gradient in ctx.gradients:
            scaled = gradient if factor == 1 else gradient * factor
            parameter.grad = scaled.clone() if parameter.grad is None else parameter.grad + scaled
        return None, None, None
