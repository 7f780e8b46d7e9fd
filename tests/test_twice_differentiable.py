"""Losses of labels whose gradient forward takes and differentiates again, and distances to tables of points."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .frontier import trains_equally

DICE = torch.Generator().manual_seed(0)
X = torch.randn(8, 3, 4, generator=DICE, dtype=torch.float64)
Y = torch.randint(0, 4, (8, 3), generator=DICE)
WEIGHT = torch.tensor([1.0, 2.0, 0.5, 4.0], dtype=torch.float64)
MESHES = {"dp2": {"dp": 2}, "tp2": {"tp": 2}, "pp2": {"pp": 2}}


class Net(nn.Module):
    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.points, self.body = nn.Linear(4, 4), nn.Parameter(torch.randn(5, 4)), body

    def forward(self, *batch: Tensor) -> Tensor:
        return self.body(self, *batch) + self.points.square().mean()


def _logits(weight: Tensor, x: Tensor) -> Tensor:
    return x @ weight.T


def _inner_step(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """One step on the weight, as meta-learning takes it, and the loss behind it."""

    def body(net: Any, x: Tensor, y: Tensor) -> Tensor:
        weight = net.linear.weight
        (gradient,) = torch.autograd.grad(loss(_logits(weight, x), y), weight, create_graph=True)
        logits = _logits(weight - 0.1 * gradient, x)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    return body


def _penalty(net: Any, x: Tensor, y: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    loss = F.cross_entropy(net.linear(x).flatten(0, 1), y.flatten())
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum()


def _by_transform(net: Any, x: Tensor, y: Tensor) -> Tensor:
    def loss(weight: Tensor) -> Tensor:
        return F.cross_entropy(_logits(weight, x).flatten(0, 1), y.flatten(), ignore_index=2)

    return loss(net.linear.weight - 0.1 * torch.func.grad(loss)(net.linear.weight))


def _flat(**options: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten(), **options)


LOSSES: dict[str, Callable[..., Tensor]] = {
    "mean": _inner_step(_flat()),
    "sum": _inner_step(_flat(reduction="sum")),
    "none": _inner_step(lambda logits, y: _flat(reduction="none")(logits, y).square().mean()),
    "weights": _inner_step(_flat(weight=WEIGHT)),
    "an ignored label": _inner_step(_flat(ignore_index=1)),
    "smoothed, with weights": _inner_step(_flat(label_smoothing=0.1, weight=WEIGHT, ignore_index=0)),
    "of [rows, classes, positions]": _inner_step(lambda logits, y: F.cross_entropy(logits.transpose(1, 2), y)),
    "nll_loss": _inner_step(lambda logits, y: F.nll_loss(logits.log_softmax(-1).transpose(1, 2), y, weight=WEIGHT)),
    "a gradient penalty": _penalty,
    "torch.func.grad": _by_transform,
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", LOSSES)
def test_a_gradient_of_a_loss_of_labels_is_differentiated_again(name: str) -> None:
    trains_equally(lambda: Net(LOSSES[name]), (X, Y), meshes=MESHES)


DISTANCES: dict[str, Callable[..., Tensor]] = {
    "few points": lambda net, x: torch.cdist(net.linear(x).reshape(-1, 4), net.points).min(1).values.mean(),
    "many points": lambda net, x: torch.cdist(net.linear(x).reshape(-1, 4), net.points.repeat(6, 1)).sum(1).mean(),
    "in rows": lambda net, x: torch.cdist(net.linear(x), net.points).min(-1).values.mean(),
    "of another kind": lambda net, x: torch.cdist(net.linear(x).reshape(-1, 4), net.points, p=1).min(1).values.mean(),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", DISTANCES)
def test_distances_of_a_number_of_rows_that_varies(name: str) -> None:
    trains_equally(lambda: Net(DISTANCES[name]), (X,), meshes=MESHES)
    trains_equally(lambda: Net(DISTANCES[name]), (X,), meshes={"dp2": {"dp": 2}}, microbatches=2)
