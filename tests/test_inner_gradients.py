"""Modules that differentiate in forward: gradients and transforms of torch.func, exact on every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import quintnet
from quintnet import Mesh

LAYOUTS: dict[str, tuple[Mesh, int]] = {
    "one": (Mesh(dp=1), 1),
    "dp": (Mesh(dp=2), 1),
    "tp": (Mesh(tp=2), 1),
    "pp": (Mesh(pp=2), 1),
    "microbatches": (Mesh(pp=2), 2),
}
Forward = Callable[[nn.Module, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, forward: Forward, net: nn.Module) -> None:
        super().__init__()
        self.function, self.net = forward, net

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.net, x)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Softplus(), nn.Linear(8, 1))


def norms() -> nn.Module:
    last = nn.Sequential(nn.GroupNorm(2, 8), nn.LogSigmoid(), nn.Linear(8, 1))
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8), nn.Softmax(-1), *last)


def images() -> nn.Module:
    first = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(4, 4, 3, padding=1, groups=2))
    return nn.Sequential(first, nn.InstanceNorm2d(4), nn.SiLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16, 1))


def penalty(net: nn.Module, x: Tensor) -> Tensor:
    """Gulrajani et al. 2017."""
    x = x.detach().requires_grad_(True)
    out = net(x)
    (slope,) = torch.autograd.grad(out, x, torch.ones_like(out), create_graph=True)
    return ((slope.flatten(1).norm(2, dim=1) - 1) ** 2).mean() + out.mean()


def residual(net: nn.Module, x: Tensor) -> Tensor:
    """An equation with a second derivative, as physics-informed networks train on."""
    x.requires_grad_(True)
    u = net(x)
    (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (d2u,) = torch.autograd.grad(du[:, 0].sum(), x, create_graph=True)
    return (d2u[:, 0] + du[:, 1] * u[:, 0]).square().mean()


def unrolled(net: nn.Module, x: Tensor) -> Tensor:
    """A step of training inside the loss (MAML)."""
    parameters = dict(net.named_parameters())
    slopes = torch.autograd.grad(net(x).square().mean(), list(parameters.values()), create_graph=True)
    moved = {name: p - 0.1 * g for (name, p), g in zip(parameters.items(), slopes, strict=True)}
    return functional_call(net, moved, (x,)).square().mean()


def not_again(net: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_(True)
    return net(x + torch.autograd.grad(net(x).sum(), x)[0]).mean()


def of_several(net: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    h = net[:2](x)
    dx, dh = torch.autograd.grad(net[2:](h).sum(), [x, h], create_graph=True)
    return dx.square().mean() + (dh * h).square().mean()


def leaf_later(net: nn.Module, x: Tensor) -> Tensor:
    """What was computed before does not depend on the leaf."""
    x = x.clone()
    before = net(x * 2)
    x.requires_grad_(True)
    return torch.autograd.grad((net(x) * before).sum(), x, create_graph=True)[0].square().mean()


def of_equal_values(net: nn.Module, x: Tensor) -> Tensor:
    one, two = torch.tanh(net[0](x)), torch.tanh(net[0](x))
    (slope,) = torch.autograd.grad(net[2:](one + 2 * two).sum(), one, create_graph=True)
    return (slope * one).square().mean()


def unused(net: nn.Module, x: Tensor) -> Tensor:
    x, z = x.detach().requires_grad_(), x.detach().requires_grad_()
    a, none = torch.autograd.grad(net(x).sum(), [x, z], create_graph=True, allow_unused=True)
    b, zeros = torch.autograd.grad(net(x).sum(), [x, z], create_graph=True, materialize_grads=True)
    assert none is None
    return (a + b + zeros).square().mean()


def batched(net: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    rows = torch.eye(8)[:, None, :].expand(8, len(x), 8)
    (jacobian,) = torch.autograd.grad(net[:3](x), x, rows, is_grads_batched=True, create_graph=True)
    return jacobian.square().mean()


def per_sample(net: nn.Module, x: Tensor) -> Tensor:
    """The norm of each row's gradient, as private training needs it."""
    parameters = dict(net.named_parameters())
    found = vmap(grad(lambda p, row: functional_call(net, p, (row[None],)).square().mean()), (None, 0))(parameters, x)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in found.values()]).norm(dim=0)
    return (norms / (1 + norms)).mean()


def ensemble(net: nn.Module, x: Tensor) -> Tensor:
    members = {name: torch.stack([p, 2 * p]) for name, p in net.named_parameters()}
    return vmap(lambda p: functional_call(net, p, (x,)))(members).square().mean()


def detached(net: nn.Module, x: Tensor) -> Tensor:
    def f(row: Tensor) -> Tensor:
        h = net[:2](row)
        return (net[2:](h) * h.detach().sum() * net[0].weight.detach().sum()).sum()

    return vmap(grad(f))(x).square().mean()


def products(net: nn.Module, x: Tensor) -> Tensor:
    out, tangent = jvp(net, (x,), (x.cos(),))
    again, back = vjp(net, x)
    return (out * tangent).mean() + (back(torch.ones_like(again))[0] * x).mean()


def jacobians(net: nn.Module, x: Tensor) -> Tensor:
    return vmap(jacrev(net[:3]))(x).square().mean() + vmap(hessian(lambda row: net(row).sum()))(x).square().mean()


def rows(net: nn.Module, x: Tensor) -> Tensor:
    return vmap(lambda row: net(row) * vmap(lambda w: (row * w).sum())(net[0].weight).sum())(x).square().mean()


CASES = [
    (penalty, mlp, "dp"),
    (penalty, images, "tp"),
    (residual, mlp, "microbatches"),
    (unrolled, mlp, "dp"),
    (leaf_later, mlp, "one"),
    (detached, mlp, "dp"),
    (products, mlp, "pp"),
]
FUNCTIONS = (
    not_again,
    per_sample,
    of_several,
    leaf_later,
    of_equal_values,
    unused,
    batched,
    ensemble,
    jacobians,
    rows,
    residual,
)
ALL = [(one, mlp, layout) for one in FUNCTIONS for layout in LAYOUTS]
SLOW = [*ALL, *((penalty, net, layout) for net in (images, norms) for layout in LAYOUTS)]


def compare(forward: Forward, make: Callable[[], nn.Module], layout: str, **options: Any) -> None:
    mesh, microbatches = LAYOUTS[layout]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = make().double()
        x = torch.randn(8, 1, 8, 8) if make is images else torch.randn(8, 4)
        x = x.double()
    module = Net(forward, net)
    loss = module(x.clone())
    loss.backward()
    wanted = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    torch.set_default_dtype(torch.float64)
    try:
        program = quintnet.compile(module, mesh, (x,), microbatches=microbatches, **options)
        found = program.step((x,))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.allclose(found.detach(), loss.detach(), rtol=1e-12, atol=1e-14)
    for name, p in module.named_parameters():
        assert (p.grad is None) == (wanted[name] is None), name
        if p.grad is not None:
            assert torch.allclose(p.grad, wanted[name], rtol=1e-10, atol=1e-13), name


@pytest.mark.sample(1)
@pytest.mark.parametrize(("forward", "make", "layout"), CASES)
def test_a_forward_that_differentiates_is_exact(forward: Forward, make: Callable[[], nn.Module], layout: str) -> None:
    compare(forward, make, layout)


@pytest.mark.slow
@pytest.mark.parametrize(("forward", "make", "layout"), SLOW)
def test_every_kind_on_every_layout(forward: Forward, make: Callable[[], nn.Module], layout: str) -> None:
    compare(forward, make, layout)


def test_a_batch_that_requires_a_gradient() -> None:
    net = mlp()
    x = torch.randn(8, 4, requires_grad=True)

    def energy(net: nn.Module, x: Tensor) -> Tensor:
        e = net(x)
        return e.mean() + torch.autograd.grad(e.sum(), x, create_graph=True)[0].square().mean()

    module = Net(energy, net)
    program = quintnet.compile(module, Mesh(dp=2), (x,))
    assert torch.allclose(program.step((x,)).detach(), module(x).detach(), atol=1e-6)
    assert torch.allclose(program.evaluate((x,)).detach(), module(x).detach(), atol=1e-6)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g * ctx.saved_tensors[0]


def through_function(net: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(Square.apply(net(x)).sum(), x, create_graph=True)[0].square().mean()


def through_hook(net: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    h = net[0](x)
    h.register_hook(lambda g: 2 * g)
    return torch.autograd.grad(net[1:](h).sum(), x, create_graph=True)[0].square().mean()


def no_grad_inside(net: nn.Module, x: Tensor) -> Tensor:
    def f(row: Tensor) -> Tensor:
        with torch.no_grad():
            known = net(row)
        return (net(row) * known).sum()

    return vmap(grad(f))(x).square().mean()


def assigned(net: nn.Module, x: Tensor) -> Tensor:
    def f(row: Tensor) -> Tensor:
        h = net[0](row).clone()
        h[0] = 0
        return net[1:](h).sum()

    return vmap(grad(f))(x).square().mean()


def forward_mode(net: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        return torch.autograd.forward_ad.unpack_dual(net(dual)).tangent.square().mean()


@pytest.mark.parametrize("forward", [through_function, through_hook, no_grad_inside, assigned, forward_mode])
def test_what_is_refused(forward: Forward) -> None:
    with pytest.raises(quintnet.CompileError, match="QN105"):
        quintnet.compile(Net(forward, mlp()), Mesh(dp=2), (torch.randn(8, 4),))


def test_masks_of_dropout_are_those_of_the_forward() -> None:
    """The program is compared with the module, under the same numbers, when it is compiled."""
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1))
    x = torch.randn(8, 4)
    assert quintnet.compile(Net(penalty, net), Mesh(dp=2), (x,)).verify().ok


def test_through_a_checkpoint() -> None:
    def f(net: nn.Module, x: Tensor) -> Tensor:
        return penalty(lambda y: checkpoint(net, y, use_reentrant=False), x)

    compare(f, mlp, "one")
