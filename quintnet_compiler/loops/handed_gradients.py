"""A loss with known gradients, as a value that autograd differentiates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.torch_hooks import accumulation_hooks, backward_hooks, set_hooks

Gradients = Sequence[tuple[nn.Parameter, Tensor]]


def differentiable(loss: Tensor, gradients: Gradients) -> Tensor:
    """Return ``loss`` as a value whose derivatives with respect to the parameters are these gradients.

    It can be differentiated on ranks that have no parameters, too.
    """
    anchor = torch.zeros((), dtype=loss.dtype, device=loss.device, requires_grad=True)
    parameters = [parameter for parameter, _ in gradients]
    values = [gradient for _, gradient in gradients]
    result: Tensor = _Handed.apply(loss, values, anchor, *parameters)  # type: ignore[no-untyped-call]
    return result


@contextmanager
def without_parameter_hooks(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Let parameters have no hooks while inside."""
    hooks = [(p, backward_hooks(p), accumulation_hooks(p)) for p in parameters]
    for p, _, accumulation in hooks:
        set_hooks(p, None, accumulation and {})
    try:
        yield
    finally:
        for p, backward, accumulation in hooks:
            set_hooks(p, backward, accumulation)


class _Handed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: Sequence[Tensor], *_: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.detach().clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, arriving: Tensor) -> tuple[Tensor | None, ...]:
        factor = float(arriving)
        scaled = (gradient if factor == 1 else gradient * factor for gradient in ctx.gradients)
        return None, None, None, *scaled
