"""``torch.cond`` and ``scan`` in forward, exact on layouts; lazy modules; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import quintnet
from quintnet import Mesh
from quintnet_compiler.compat import torch_control_flow

Forward = Callable[[nn.Module, Tensor], Tensor]
followed = pytest.mark.skipif(
    not hasattr(torch._higher_order_ops.utils, torch_control_flow._RUNS), reason="torch 2.11 traces none of these"
)


class Net(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.function, self.net = forward, nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.net, x)


def branches(net: nn.Module, x: Tensor) -> Tensor:
    """The predicate is a sum over all rows; the branch that is not taken has values that are no numbers."""
    return torch.cond(x.sum() > 1e9, lambda x: net(x.log()), lambda x: net(x) * 2, (x,)).square().mean()


def branches_in_python(net: nn.Module, x: Tensor) -> Tensor:
    return (net(x.log()) if x.sum() > 1e9 else net(x) * 2).square().mean()


def steps(net: nn.Module, x: Tensor) -> Tensor:
    def step(held: dict[str, Tensor], row: Tensor) -> Any:
        held = {"h": torch.tanh(held["h"] + net(row))}
        return held, (held["h"].clone(), held["h"] * 2)

    rows = torch.stack([x, x.cos(), x.sin()], 1)
    held, (one, two) = scan(step, {"h": x[:, :1] * 0}, rows, dim=1, reverse=True)
    return one.square().mean() + (two * torch.arange(3.0, dtype=x.dtype)[:, None]).mean() + held["h"].mean()


def steps_in_python(net: nn.Module, x: Tensor) -> Tensor:
    h, rows, one, two = x[:, :1] * 0, (x, x.cos(), x.sin()), [], []
    for row in reversed(rows):
        h = torch.tanh(h + net(row))
        one.insert(0, h)
        two.insert(0, h * 2)
    weights = torch.arange(3.0, dtype=x.dtype)[:, None]
    return torch.stack(one, 1).square().mean() + (torch.stack(two, 1) * weights).mean() + h.mean()


@followed
@pytest.mark.parametrize(
    ("forward", "plain", "mesh", "microbatches"),
    [
        (branches, branches_in_python, Mesh(dp=2), 1),
        (branches, branches_in_python, Mesh(tp=2), 1),
        (steps, steps_in_python, Mesh(tp=2), 1),
        (steps, steps_in_python, Mesh(pp=2), 2),
    ],
)
def test_functions_in_operators(forward: Forward, plain: Forward, mesh: Mesh, microbatches: int) -> None:
    module = Net(forward).double()
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    loss = plain(module.net, x)
    wanted = torch.autograd.grad(loss, list(module.parameters()))
    program = quintnet.compile(module, mesh, (x,), microbatches=microbatches)
    assert torch.allclose(program.step((x,)).detach(), loss.detach(), rtol=1e-12)
    for p, gradient in zip(module.parameters(), wanted, strict=True):
        assert p.grad is not None and torch.allclose(p.grad, gradient, rtol=1e-10, atol=1e-13)


@followed
def test_a_predicate_over_all_rows_needs_all_rows() -> None:
    with pytest.raises(quintnet.CompileError, match="QN104"):
        quintnet.compile(Net(branches), Mesh(pp=2), (torch.randn(8, 4),), microbatches=2)


def rounds(net: nn.Module, x: Tensor) -> Tensor:
    return while_loop(lambda h: h.sum() < 3, lambda h: (h + net(h).mean(),), (x,))[0].mean()


def over_rows(net: nn.Module, x: Tensor) -> Tensor:
    return scan(lambda h, row: (h + net(row), h * 1), x.new_zeros(1), x)[0].mean()


@followed
@pytest.mark.parametrize("forward", [rounds, over_rows])
def test_what_is_refused(forward: Forward) -> None:
    with pytest.raises(quintnet.CompileError, match="QN105"):
        quintnet.compile(Net(forward), Mesh(dp=2), (torch.randn(8, 4),))


def test_lazy_modules_are_called_once_before() -> None:
    module = nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(1))
    batch = torch.randn(8, 4), torch.randn(8, 1)
    with pytest.raises(quintnet.CompileError, match=r"QN101.*\n  lazy modules have no shapes yet: 0.weight, 0.bias"):
        quintnet.compile(module, Mesh(dp=2), batch, loss_fn=nn.functional.mse_loss)
    module(batch[0])  # the fix
    quintnet.compile(module, Mesh(dp=2), batch, loss_fn=nn.functional.mse_loss).step(batch)


class Loop(nn.Module):
    """A mixture of experts as many models write it, and with masks, as the error says."""

    def __init__(self, masks: bool) -> None:
        super().__init__()
        self.gate, self.masks = nn.Linear(4, 3), masks
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = torch.topk(self.gate(x).softmax(-1), 2)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            if self.masks:
                out = out + (weights * (ids == e)).sum(-1, keepdim=True) * expert(x)
            else:
                row, way = torch.where(ids == e)
                out[row] += weights[row, way, None] * expert(x[row])
        return out.square().mean()


@pytest.mark.parametrize("masks", [False, True])
def test_a_loop_over_experts(masks: bool) -> None:
    """As it is, and with masks, as the error for other shapes that depend on values says."""
    x = torch.randn(8, 4, dtype=torch.float64)
    loop, compiled = Loop(False).double(), Loop(masks).double()
    compiled.load_state_dict(loop.state_dict())
    loss = loop(x)
    wanted = torch.autograd.grad(loss, list(loop.parameters()))
    program = quintnet.compile(compiled, Mesh(dp=2), (x,), microbatches=2)
    assert torch.allclose(program.step((x,)).detach(), loss.detach(), rtol=1e-12)
    for p, gradient in zip(compiled.parameters(), wanted, strict=True):
        assert p.grad is not None and torch.allclose(p.grad, gradient, rtol=1e-10, atol=1e-13)
