"""Functions whose backward runs their part again: checkpoints that people write, and reversible blocks.

And what derivatives may do to the module's state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet

from .frontier import Case, compare, refused, report, trains_equally

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
MESHES = {"dp2": {"dp": 2}, "tp2": {"tp": 2}, "pp2": {"pp": 2}}


class Again(torch.autograd.Function):
    """Tensors, then parameters; gradients by torch.autograd.grad, as in diffusion U-Nets."""

    @staticmethod
    def forward(ctx: Any, part: Any, count: int, *args: Tensor) -> Tensor:
        ctx.part, ctx.inputs, ctx.parameters = part, list(args[:count]), list(args[count:])
        with torch.no_grad():
            return part(*ctx.inputs)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.inputs = [x.detach().requires_grad_(True) for x in ctx.inputs]
        with torch.enable_grad():
            made = ctx.part(*[x.view_as(x) for x in ctx.inputs])
        found = torch.autograd.grad(made, ctx.inputs + ctx.parameters, gradients, allow_unused=True)
        return (None, None, *found)


class Accumulated(torch.autograd.Function):
    """Parameters get their gradients by torch.autograd.backward, or by that of a tensor."""

    @staticmethod
    def forward(ctx: Any, part: Any, by_tensor: bool, x: Tensor) -> Tensor:
        ctx.part, ctx.by_tensor = part, by_tensor
        ctx.save_for_backward(x)
        with torch.no_grad():
            return part(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            made = ctx.part(x)
        if ctx.by_tensor:
            made.backward(gradient)
        else:
            torch.autograd.backward(made, gradient)
        return None, None, x.grad


class Reversible(torch.autograd.Function):
    """Inputs are computed from the results."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, f: Any, g: Any, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        ctx.f, ctx.g, ctx.parameters = f, g, parameters
        with torch.no_grad():
            c = a + f(b)
            d = b + g(c)
        ctx.save_for_backward(c, d)
        return c, d

    @staticmethod
    def backward(ctx: Any, gc: Tensor, gd: Tensor) -> Any:
        c, d = ctx.saved_tensors
        with torch.enable_grad():
            c = c.detach().requires_grad_()
            made = ctx.g(c)
            b = (d - made).detach().requires_grad_()
            before = ctx.f(b)
        first = torch.autograd.grad(made, [c, *ctx.parameters], gd, allow_unused=True)
        ga = gc + first[0]
        second = torch.autograd.grad(before, [b, *ctx.parameters], ga, allow_unused=True)
        both = zip(first[1:], second[1:], strict=True)
        return ga, gd + second[0], None, None, *[y if x is None else x if y is None else x + y for x, y in both]


class Equilibrium(torch.autograd.Function):
    """A fixed point; the gradient of one more step there, as phantom gradients of deep equilibrium models take it."""

    @staticmethod
    def forward(ctx: Any, part: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.part, ctx.parameters = part, parameters
        z = torch.zeros_like(x)
        for _ in range(4):
            z = torch.tanh(part(z) + x)
        ctx.save_for_backward(z, x)
        return z

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        z, x = ctx.saved_tensors
        with torch.enable_grad():
            z, x = z.detach(), x.detach().requires_grad_()
            made = torch.tanh(ctx.part(z) + x)
        return None, *torch.autograd.grad(made, [x, *ctx.parameters], gradient)


class Net(nn.Module):
    def __init__(self, body: Callable[[Any, Tensor], Tensor], *, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.body = nn.Linear(6, 6), nn.Linear(6, 4), body
        self.part = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8) if norm else nn.SiLU(), nn.Linear(8, 6))
        self.other = nn.Linear(6, 6)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self, torch.tanh(self.first(x)))).square().mean()


def _again(net: Any, h: Tensor) -> Tensor:
    return Again.apply(net.part, 1, h, *net.part.parameters())  # type: ignore[no-untyped-call, no-any-return]


def _reversible(net: Any, h: Tensor) -> Tensor:
    parameters = (*net.part.parameters(), *net.other.parameters())
    a, b = Reversible.apply(h, h * 2, net.part, net.other, *parameters)  # type: ignore[no-untyped-call]
    return a + b  # type: ignore[no-any-return]


BODIES: dict[str, Callable[[Any, Tensor], Any]] = {
    "again": lambda net, h: h + _again(net, h),
    "twice": lambda net, h: Again.apply(
        net.part, 1, Again.apply(net.part, 1, h, *net.part.parameters()), *net.part.parameters()
    ),
    "accumulated": lambda net, h: h + Accumulated.apply(net.part, False, h),
    "accumulated by a tensor": lambda net, h: Accumulated.apply(net.part, True, h) + net.part(h),
    "reversible": _reversible,
    "equilibrium": lambda net, h: Equilibrium.apply(net.other, h, *net.other.parameters()),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", BODIES)
def test_gradients_are_those_of_the_module(name: str) -> None:
    trains_equally(lambda: Net(BODIES[name]), (X,), meshes=MESHES)


@pytest.mark.parametrize("name", ["again", "accumulated"])
def test_with_slices_and_microbatches(name: str) -> None:
    for axes, options in (({"dp": 2, "tp": 2}, {"zero": 3}), ({"pp": 2}, {"microbatches": 2, "recompute": "full"})):
        case = Case(lambda: Net(BODIES[name]), (X,), options=options)
        report(case, {str(axes): compare(case, axes)})


@pytest.mark.slow
def test_a_norm_that_such_a_function_runs_twice() -> None:
    trains_equally(lambda: Net(BODIES["again"], norm=True), (X,), meshes={"dp2": {"dp": 2}, "tp2": {"tp": 2}})


class Observed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, buffer: Tensor, constant: bool) -> Tensor:
        ctx.buffer, ctx.constant = buffer, constant
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        if ctx.constant:
            ctx.buffer.add_(1)
        else:
            ctx.buffer.copy_(g.abs().mean())
        return g * 2, None, None


def _hook(net: Any, h: Tensor) -> Tensor:
    h = h * 1
    h.register_hook(lambda g: (net.count.copy_(g.norm()), g)[1])
    return h


def _read_later(net: Any, h: Tensor) -> Tensor:
    return Observed.apply(h, net.count, True) * (net.count + 1)  # type: ignore[no-untyped-call, no-any-return]


def _unreached(net: Any, h: Tensor) -> Tensor:
    return h + Observed.apply(h, net.count, True).detach()  # type: ignore[no-untyped-call, no-any-return]


def test_a_backward_that_counts_is_followed() -> None:
    trains_equally(lambda: Net(lambda net, h: Observed.apply(h, net.count, True)), (X,), meshes=MESHES)  # type: ignore[no-untyped-call]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("body", "cause"),
    [
        (lambda net, h: Observed.apply(h, net.count, False), "writes what it sees of gradients into 'count'"),
        (_hook, "writes what it sees of gradients into 'count'"),
        (_read_later, "changes 'count', which the forward pass changes or reads later"),
        (_unreached, "changes 'count', and the loss does not depend on it"),
    ],
)
def test_a_backward_with_state_that_no_program_has_in_time_is_refused(body: Any, cause: str) -> None:
    texts = refused(lambda: Net(body), (X,), "QN105", cause=cause, meshes=MESHES, check="off")
    assert all("test_own_checkpoints.py:" in text for text in texts.values())


def test_backward_in_forward_is_refused() -> None:
    def body(net: Any, h: Tensor) -> Tensor:
        torch.autograd.backward(net.other(h).sum())
        return h

    refused(lambda: Net(body), (X,), "QN105", cause="torch.autograd.backward in forward", meshes={"dp2": {"dp": 2}})


class Attention(nn.Module):
    """Attention whose backward runs it again."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query(x)[:, None, None].expand(-1, 1, 3, -1)
        again: Tensor = Again.apply(lambda h: F.scaled_dot_product_attention(h, h, h), 1, heads)  # type: ignore[no-untyped-call]
        return again.square().mean()


def test_a_dropout_of_zero_draws_no_numbers() -> None:
    with pytest.raises(quintnet.CompileError, match="has no sharding rule") as raised:
        quintnet.compile(Attention().double(), quintnet.Mesh(dp=2), (X,))
    assert raised.value.code == "QN202"
