"""Derivatives that a model's author wrote, on rows and features that do not divide."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import Mesh

from .each_layout import train_as_plain

torch.set_num_threads(1)


class Rounded(torch.autograd.Function):
    """The gradient passes as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Inverse(torch.autograd.Function):
    """Of zeros it is no number, and nor is its derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 1 / x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return -gradient / x.square()


class Linear(torch.autograd.Function):
    """The gradient of the weight is a sum over rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x * 0.5


class Centred(torch.autograd.Function):
    """The gradient of a row depends on those of all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient - gradient.sum(0)


class Net(nn.Module):
    """``function``: of the hidden features, which are as many as ``width``."""

    def __init__(self, function: str, width: int = 8) -> None:
        super().__init__()
        self.first, self.last, self.function = nn.Linear(6, width), nn.Linear(width, 4), function

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.function == "linear":
            return self.last(torch.tanh(Linear.apply(x, self.first.weight)))  # type: ignore[no-untyped-call]
        if self.function == "parameter":
            weight = Rounded.apply(self.first.weight) * Inverse.apply(self.first.weight)  # type: ignore[no-untyped-call]
            return self.last(torch.tanh(x @ weight.t()))
        if self.function == "hook":
            h = h.clone()
            if h.requires_grad:
                h.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
            return self.last(torch.tanh(h))
        kinds = {"rounded": Rounded, "inverse": Inverse, "centred": Centred}
        return self.last(torch.tanh(kinds[self.function].apply(h)))  # type: ignore[no-untyped-call]


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 6, dtype=torch.float64, generator=dice), torch.randint(4, (rows,), generator=dice)


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", ["dp2", "pp2"])
@pytest.mark.parametrize("function", ["rounded", "inverse", "linear", "parameter", "hook"])
def test_rows_that_do_not_divide(function: str, layout: str) -> None:
    train_as_plain(Net(function).double(), layout, [_batch(8), _batch(7)], F.cross_entropy)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", ["tp2", "dp2 tp2 zero3"])
@pytest.mark.parametrize("function", ["rounded", "inverse", "linear", "parameter", "hook"])
def test_features_that_do_not_divide(function: str, layout: str) -> None:
    train_as_plain(Net(function, 7).double(), layout, [_batch(7)] * 2, F.cross_entropy)


def test_a_backward_over_all_rows_is_refused_by_its_operator() -> None:
    with pytest.raises(quintnet.QuintNetError, match=r"(?s)QN104.*aten\.sum\.dim_IntList") as refusal:
        quintnet.compile(Net("centred").double(), Mesh(dp=2), _batch(7), loss_fn=F.cross_entropy, microbatches=2)
    assert "declare_gradient" not in str(refusal.value)
    train_as_plain(Net("centred").double(), "dp2", [_batch(7)] * 2, F.cross_entropy, microbatches=1)
