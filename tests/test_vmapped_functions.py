"""Functions with derivatives of their own inside transforms of torch.func, whose vmap rule torch generates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .frontier import trains_equally

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
MESHES = {"dp2": {"dp": 2}, "tp2": {"tp": 2}, "pp2": {"pp": 2}}


class Doubled(torch.autograd.Function):
    """The hyperbolic tangent; its gradient is twice that of no such function."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2 * ctx.saved_tensors[0]  # type: ignore[no-any-return]


class Several(torch.autograd.Function):
    """Two inputs, one of them for all rows, and two results."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return x * weight.sum(), x + 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return g * 3 + h, (g * x).sum() * weight


class Net(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.weight, self.body = nn.Linear(4, 4), nn.Parameter(torch.ones(4)), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.linear(x)).square().mean() + self.weight.square().sum()


BODIES: dict[str, Callable[[Any, Tensor], Any]] = {
    "rows": lambda net, h: torch.vmap(Doubled.apply)(h),
    "columns": lambda net, h: torch.vmap(Doubled.apply, in_dims=1, out_dims=1)(h),
    "chunks": lambda net, h: torch.vmap(Doubled.apply, chunk_size=3)(h),
    "nested": lambda net, h: torch.vmap(torch.vmap(Doubled.apply))(h),
    "several": lambda net, h: torch.vmap(lambda x: sum(Several.apply(x, net.weight)))(h),
    "gradients of rows": lambda net, h: torch.vmap(torch.func.grad(lambda x: Doubled.apply(x).sum()))(h),
    "after other operators": lambda net, h: torch.vmap(lambda x: Doubled.apply(x * x).sum())(h),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", BODIES)
def test_their_own_backward_is_used(name: str) -> None:
    trains_equally(lambda: Net(BODIES[name]), (X,), meshes=MESHES)
