"""Values that forward changes in place where autograd does not see it: gradients are those of the module, on layouts.

Without the check of the first batch, which would find a difference: here nothing but the program itself is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet

from .frontier import LAYOUTS, Case, compare, report

Body = Callable[[nn.Module, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.a, self.b, self.body = nn.Linear(4, 4), nn.Linear(4, 4), body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x).square().mean()


def whole(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    with torch.no_grad():
        h = h.mul_(2)
        h.clamp_(-0.5, 0.5)
    return net.b(h) + h


def views(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    v, flat, copied = h[:, :2], h.reshape(-1), h.t().reshape(-1)
    with torch.no_grad():
        v.mul_(2)
        h[:, 1] = 3.0
        h[:, 2:].add_(h[:, :2])
    return net.b(h) + v.sum(1, keepdim=True) + flat.reshape(h.shape) + copied.reshape(4, -1).t().sin()


def by_detach(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    d = h.detach()
    h.data.mul_(2)
    d[:, 0] = net.b(x)[:, 0]  # has a gradient: that of d alone
    return net.b(h) + d


def in_turns(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    v = h[:, 2:]
    with torch.no_grad():
        h.mul_(2)
    v.add_(net.b(x)[:, 2:])
    torch.set_grad_enabled(False)
    v.mul_(3)
    torch.set_grad_enabled(True)
    h[:, 0] = net.b(x)[:, 1]
    return net.b(h) + v.sum(1, keepdim=True)


def inference(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    with torch.inference_mode():
        teacher = net.b(x)
        h.clamp_(-0.5, 0.5)
    return h + net.b(h) - teacher


def made_inside(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        z = torch.zeros_like(x)
    z[:, 0] = net.a(x)[:, 0]
    return net.b(z)


def cut(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    return net.b(h.detach_()) + net.a(x)


def many(net: Any, x: Tensor) -> Tensor:
    h, k = net.a(x), net.b(x)
    with torch.no_grad():
        for one in (h, k):
            one.mul_(2.0)
        torch.mul(h, 0.3, out=h)
        k[x > 0] = 0.5
    return h + k.sin()


def parts(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    d = h[:, :2].detach()
    d.add_(net.b(x)[:, 2:])
    with torch.no_grad():
        h[:, 1:].clamp_(-0.5, 0.5)
    d.mul_(2)
    net.b.bias.detach()[:2].mul_(0.5)
    return net.b(h) + torch.cat([d, h[:, 2:]], 1)


def loop(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    for _ in range(3):
        h = h + net.b(h)
        h.data = h.data.clamp(-1, 1)
    return h


def hooked(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    h.register_hook(lambda gradient: gradient * 3)
    with torch.no_grad():
        h.clamp_(-0.2, 0.2)
    h.register_hook(lambda gradient: gradient * 2)
    return net.b(h)


def under_autocast(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    with torch.autocast("cpu", enabled=False), torch.no_grad():
        h.clamp_(-0.5, 0.5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            teacher = (x * 2).sin()
            teacher += net.b.bias
        mine = h * 2
        with torch.no_grad():
            mine.clamp_(-0.3, 0.3)
    return mine * 2 - teacher


def nothing_dropped(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    y = F.dropout(h, 0.5, training=False)  # h itself
    with torch.no_grad():
        h.mul_(2)
    return net.b(h) + y.sin()


class InPlace(torch.autograd.Function):
    """Its backward is not that of what it does."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        h.mul_(2)
        return h * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 5


class Dirty(InPlace):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.mark_dirty(h.mul_(2))
        return h


def by_functions(net: Any, x: Tensor) -> Tensor:
    h, k = net.a(x), net.b(x)
    y = InPlace.apply(h)
    Dirty.apply(k)
    return net.b(h) + y + k


BODIES = (
    whole, views, by_detach, in_turns, inference, made_inside, cut, many, parts, loop, hooked, under_autocast,
    nothing_dropped, by_functions,
)  # fmt: skip
MICROBATCHES = {"pp2, 2 microbatches": {"pp": 2}, "dp2, ZeRO 3": {"dp": 2}}
OPTIONS = {"pp2, 2 microbatches": {"microbatches": 2}, "dp2, ZeRO 3": {"zero": 3}}
# one layout of each body runs always
FAST = [(body, list(LAYOUTS)[1:][i % 4]) for i, body in enumerate(BODIES)]


def _case(body: Body, **options: Any) -> Case:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return Net(body)

    batch = (torch.randn(8, 4, generator=torch.Generator().manual_seed(0)),)
    return Case(build, batch, options={"check": "off", **options})


@pytest.mark.sample(1)
@pytest.mark.parametrize(("body", "layout"), FAST)
def test_gradients_are_those_of_the_module(body: Body, layout: str) -> None:
    case = _case(body)
    report(case, {layout: compare(case, LAYOUTS[layout])})


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*LAYOUTS, *MICROBATCHES])
@pytest.mark.parametrize("body", BODIES)
def test_on_every_layout(body: Body, layout: str) -> None:
    case = _case(body, **OPTIONS.get(layout, {}))
    report(case, {layout: compare(case, {**LAYOUTS, **MICROBATCHES}[layout])})


def saved(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    y = h * h.sin()
    with torch.no_grad():
        h.mul_(2)
    return y + h


def saved_and_changed_by_data(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    y = h * h.sin()
    h.data.mul_(2)  # PyTorch differentiates at the new value
    return y + h


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        ctx.h = h
        return h.view_as(h)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.h


def kept(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    y = Same.apply(h)
    with torch.no_grad():
        h.mul_(2)
    return y + h


def inside_autocast(net: Any, x: Tensor) -> Tensor:
    h = net.a(x)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        h.clamp_(-0.2, 0.2)
    return h  # type: ignore[no-any-return]


def attack(net: Any, x: Tensor) -> Tensor:
    d = torch.zeros_like(x).requires_grad_()
    for _ in range(2):
        (slope,) = torch.autograd.grad(net.b(net.a(x + d).tanh()).square().mean(), d)
        with torch.no_grad():
            d.add_(slope).clamp_(-0.01, 0.01)
    return net.a(x + d.detach())  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("body", "code", "cause"),
    [
        (saved, "QN110", "changes a tensor in place after mul has saved"),
        (saved_and_changed_by_data, "QN110", "changes a tensor in place after mul has saved"),
        (kept, "QN110", "changes what torch.autograd.Function Same .* in place"),
        (inside_autocast, "QN110", "inside a region of torch.autocast"),
        (attack, "QN105", "torch.autograd.grad in forward, through .* what forward changes in place"),
    ],
)
def test_refused(body: Body, code: str, cause: str) -> None:
    case = _case(body)
    with pytest.raises(quintnet.CompileError, match=cause) as caught:
        quintnet.compile(case.build(), quintnet.Mesh(dp=2), case.batch, check="off").step(case.batch)
    assert caught.value.code == code


def test_an_attack_that_makes_new_leaves() -> None:
    """The fix for what is refused above."""

    def body(net: Any, x: Tensor) -> Tensor:
        d = torch.zeros_like(x).requires_grad_()
        for _ in range(2):
            (slope,) = torch.autograd.grad(net.b(net.a(x + d).tanh()).square().mean(), d)
            d = (d + slope).clamp(-0.01, 0.01).detach().requires_grad_()
        return net.a(x + d.detach())  # type: ignore[no-any-return]

    case = _case(body)
    report(case, {"dp2": compare(case, LAYOUTS["dp2"])})
