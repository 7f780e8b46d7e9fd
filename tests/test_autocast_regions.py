"""Regions of torch.autocast in forward that are switched off, as public models write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .frontier import trains_equally

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
MESHES = {"dp2": {"dp": 2}, "tp2": {"tp": 2}, "pp2": {"pp": 2}}
Body = Callable[[Any, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last, self.body = nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x).square().mean()


def _off(net: Any, x: Tensor) -> Tensor:
    with torch.autocast("cuda", enabled=False):
        return net.last(net.norm(net.first(x)))  # type: ignore[no-any-return]


@torch.autocast("cuda", enabled=False)
def _decorated(net: Any, x: Tensor) -> Tensor:
    return net.last(net.norm(net.first(x)))  # type: ignore[no-any-return]


def _nested(net: Any, x: Tensor) -> Tensor:
    with torch.autocast("cuda", enabled=False):
        h = net.first(x)
        with torch.autocast("cpu", enabled=False):
            h = net.norm(h)
            with torch.autocast("cuda", enabled=False):
                h = h * 2
        return net.last(h)  # type: ignore[no-any-return]


def _two(net: Any, x: Tensor) -> Tensor:
    with torch.autocast("cuda", enabled=False):
        h, total = net.first(x), x.sum(1, keepdim=True)
    with torch.autocast("cpu", enabled=False):
        return net.last(net.norm(h)) + total  # type: ignore[no-any-return]


def _without_gradients(net: Any, x: Tensor) -> Tensor:
    with torch.autocast("cuda", enabled=False):
        with torch.no_grad():
            h = net.first(x)
        return net.last(h + net.norm(net.first(x)))  # type: ignore[no-any-return]


def _in_place(net: Any, x: Tensor) -> Tensor:
    h = net.norm(net.first(x))
    with torch.autocast("cuda", enabled=False):
        return net.last(h.mul(2).add_(torch.full((8,), 2.0, dtype=h.dtype)))  # type: ignore[no-any-return]


def _nothing_inside(net: Any, x: Tensor) -> Tensor:
    with torch.autocast("cuda", enabled=False):
        h = x
    return net.last(net.norm(net.first(h)))  # type: ignore[no-any-return]


BODIES = (_off, _decorated, _nested, _two, _without_gradients, _in_place, _nothing_inside)


@pytest.mark.sample(1)
@pytest.mark.parametrize("body", BODIES)
def test_a_region_that_is_off_is_plain_code(body: Body) -> None:
    trains_equally(lambda: Net(body), (X,), meshes=MESHES)
