"""``torch.cond``, ``scan``, ``map`` and loops in forward, exact on layouts; what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import map as map_rows
from torch._higher_order_ops.associative_scan import associative_scan
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


def counted(net: nn.Module, x: Tensor) -> Tensor:
    """As many rounds as a number says that forward makes."""
    first = torch.tensor(0), x, net(x)
    _, _, h = while_loop(lambda i, x, h: i < 3, lambda i, x, h: (i + 1, x * 1, h + net(x + h)), first)
    return h.square().mean()


def counted_in_python(net: nn.Module, x: Tensor) -> Tensor:
    h = net(x)
    for _ in range(3):
        h = h + net(x + h)
    return h.square().mean()


def mapped(net: nn.Module, x: Tensor) -> Tensor:
    """Over the rows of the batch, and over three values."""
    ones = torch.ones(4, dtype=x.dtype)
    rows = map_rows(lambda row, ones: {"a": net(row["x"]), "b": row["x"] @ ones}, {"x": x}, ones)
    three = map_rows(lambda one, x: net(one + x), torch.stack([x, x.sin(), x.cos()]), x)
    return rows["a"].square().mean() + rows["b"].mean() + three.cos().mean()


def mapped_in_python(net: nn.Module, x: Tensor) -> Tensor:
    three = torch.stack([net(one + x) for one in (x, x.sin(), x.cos())])
    return net(x).square().mean() + x.sum(1).mean() + three.cos().mean()


def associative(net: nn.Module, x: Tensor) -> Tensor:
    parts = torch.stack([net(x), net(x.sin()), net(x.cos())], 1)
    return associative_scan(lambda a, b: a * b, parts, 1, reverse=True, combine_mode="generic").mean()  # type: ignore[no-any-return]


def associative_in_python(net: nn.Module, x: Tensor) -> Tensor:
    a, b, c = net(x), net(x.sin()), net(x.cos())
    return torch.stack([a * b * c, b * c, c], 1).mean()


LOOPS = (counted, counted_in_python), (mapped, mapped_in_python), (associative, associative_in_python)
MESHES = (Mesh(dp=1), 1), (Mesh(dp=2), 2), (Mesh(tp=2), 1), (Mesh(pp=2), 2), (Mesh(dp=2, tp=2), 1)


@pytest.mark.sample(1)
@followed
@pytest.mark.parametrize(
    ("forward", "plain", "mesh", "microbatches"),
    [
        (branches, branches_in_python, Mesh(dp=2), 1),
        (branches, branches_in_python, Mesh(tp=2), 1),
        (steps, steps_in_python, Mesh(tp=2), 1),
        (steps, steps_in_python, Mesh(pp=2), 2),
        (counted, counted_in_python, Mesh(dp=2), 1),
        (mapped, mapped_in_python, Mesh(tp=2), 1),
        (associative, associative_in_python, Mesh(pp=2), 2),
        *(pytest.param(*pair, *where, marks=pytest.mark.slow) for pair in LOOPS for where in MESHES),
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


@pytest.mark.sample(1)
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
