"""What a module does with modes, attributes and state: followed as plain PyTorch does, or refused by name."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import Mesh

from . import frontier

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
Y = torch.randint(4, (8,), generator=torch.Generator().manual_seed(2))


class Distilled(nn.Module):
    """A student that learns from a frozen teacher in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
        self.teacher = nn.Sequential(nn.Linear(16, 4), nn.Dropout(0.5), nn.BatchNorm1d(4)).eval().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.student(x), self.teacher(x))


@pytest.mark.slow
def test_each_module_trains_in_the_mode_that_it_has() -> None:
    frontier.trains_equally(Distilled, (X,))
    model = Distilled()
    program = quintnet.compile(model, Mesh(dp=2), (X,))
    program.evaluate((X,))
    assert program.verify().ok
    assert model.training and not model.teacher.training and not model.teacher[1].training


def test_a_model_in_evaluation_mode_trains_without_dropout() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 4)).eval()

    frontier.trains_equally(build, (X, Y), F.cross_entropy, frontier.TWO_RANKS)


class Net(nn.Module):
    """A linear layer, a dropout, and state of every kind; ``body`` is its forward."""

    def __init__(self, body: Callable[..., Tensor]) -> None:
        super().__init__()
        self.body, self.inner, self.drop = body, nn.Linear(16, 4), nn.Dropout(0.5)
        self.beta, self.scales, self.log, self.last, self.count = 0.5, [1.0, 2.0], [], None, 0
        self.register_buffer("ema", torch.zeros(4))
        self.table = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def _weighed(net: Any, x: Tensor) -> Tensor:
    h = net.drop(net.inner(x)) * net.table
    return h.square().mean() + net.beta * net.scales[0] * h.abs().mean()


def _set(**values: Any) -> Callable[[Any, int], None]:
    """In step 1 attributes get other values; in step 2 those that they had."""

    def before(net: Any, step: int) -> None:
        for name, value in values.items():
            owner, _, last = name.replace("__", ".").rpartition(".")
            part = net.get_submodule(owner)
            if step == 1:
                part.was = getattr(part, last)
            setattr(part, last, value if step == 1 else getattr(part, "was", getattr(part, last)))

    return before


def _scaled(net: Any, step: int) -> None:
    net.scales[0] = float(step)


def _frozen(net: Any, step: int) -> None:
    net.inner.weight.requires_grad_(step == 1)


def _table(net: Any, step: int) -> None:
    net.table.fill_(step)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "before",
    [
        pytest.param(_set(beta=3.0), id="attribute"),
        pytest.param(_set(drop__p=0.1), id="dropout"),
        pytest.param(lambda net, step: net.train(step != 1), id="mode"),
        pytest.param(_scaled, id="list"),
        pytest.param(_table, id="constant"),
        pytest.param(_frozen, id="requires_grad"),
    ],
)
def test_a_change_after_compile_is_followed(before: Callable[[Any, int], None]) -> None:
    meshes = {name: frontier.LAYOUTS[name] for name in ("dp1", "dp2 x tp2")}
    frontier.trains_equally(lambda: Net(_weighed), (X,), meshes=meshes, before=before)


def test_the_same_settings_again_take_the_same_program() -> None:
    net = Net(_weighed)
    program = quintnet.compile(net, Mesh(dp=1), (X,))
    first = program._programs.get("train", (X,))
    net.beta = 3.0
    other = program._programs.get("train", (X,))
    net.beta = 0.5
    assert program._programs.get("train", (X,)) is first and other is not first


def test_another_part_is_refused() -> None:
    net = Net(_weighed)
    program = quintnet.compile(net, Mesh(dp=2), (X,))
    program.step((X,))
    net.inner = nn.Linear(16, 4)
    with pytest.raises(quintnet.CompileError, match=r"QN112[\s\S]*inner\.weight, which is another object now"):
        program.step((X,))


COUNTS = [0]


def _counts(net: Any, x: Tensor) -> Tensor:
    net.count += 1
    return net.inner(x).mean()


def _logs(net: Any, x: Tensor) -> Tensor:
    h = net.inner(x)
    net.log.append(h)
    return h.mean()


def _keeps(net: Any, x: Tensor) -> Tensor:
    net.last = net.inner(x)
    return net.last.mean()


def _draws(net: Any, x: Tensor) -> Tensor:
    return net.inner(x).mean() * random.random()


def _draws_numpy(net: Any, x: Tensor) -> Tensor:
    return net.inner(x).mean() * float(np.random.rand())


def _global(net: Any, x: Tensor) -> Tensor:
    COUNTS[0] += 1
    return net.inner(x).mean()


def _constant(net: Any, x: Tensor) -> Tensor:
    net.table += 1
    return (net.inner(x) * net.table).mean()


def _divides(net: Any, x: Tensor) -> Tensor:
    x /= 255
    return net.inner(x).mean()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("body", "cause", "line"),
    [
        (_counts, r"attribute 'count' \(from 0 to 1\)", "net.count += 1"),
        (_logs, "attribute 'log'", "net.log.append(h)"),
        (_keeps, "attribute 'last'", "net.last = net.inner(x)"),
        (_global, "variable 'COUNTS'", "COUNTS[0] += 1"),
        (_draws, "state of Python's random", "random.random()"),
        (_draws_numpy, "state of numpy.random", "np.random.rand()"),
        (_constant, "neither a buffer", "net.table += 1"),
        (_divides, r"input 'batch\[0\]'", ""),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_forward_changes_is_refused_and_put_back(body: Callable[..., Tensor], cause: str, line: str) -> None:
    net, batch = Net(body), (X.clone(),)
    held, generator = dict(vars(net)), random.getstate()
    with pytest.raises(quintnet.CompileError, match=cause) as caught:
        quintnet.compile(net, Mesh(dp=2), batch)
    assert caught.value.code == "QN110" and line in caught.value.where.source
    assert vars(net) == held and net.log == [] and COUNTS == [0] and random.getstate() == generator
    assert torch.equal(batch[0], X) and torch.equal(net.ema, torch.zeros(4)) and torch.equal(net.table, torch.ones(4))


def test_evaluation_that_changes_its_batch_is_refused() -> None:
    class Scales(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                x /= 255
            return super().forward(x)

    program = quintnet.compile(Scales(nn.Linear(16, 4)), Mesh(dp=2), (X, Y), loss_fn=F.cross_entropy)
    for run in (lambda: program.evaluate((X, Y)), lambda: program(X)):
        with pytest.raises(quintnet.CompileError, match=r"QN110[\s\S]*batch\[0\]"):
            run()


@pytest.mark.slow
def test_what_forward_leaves_equal_and_changes_in_its_own_tensors_is_followed() -> None:
    def body(net: Any, x: Tensor) -> Tensor:
        net.count, net.log = 0, []
        h = net.inner(x)
        h[:, 0] = 0
        h += 1
        return h.square().mean()

    frontier.trains_equally(lambda: Net(body), (X,), meshes=frontier.TWO_RANKS)


class Criterion:
    """Not a module: it has one."""

    def __init__(self) -> None:
        self.head = nn.Linear(4, 4)

    def loss(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(z), y)


def _with_scale(head: nn.Module, scale: Tensor, z: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(head(z) * scale, y)


def _closure() -> Any:
    head = nn.Linear(4, 4)
    return nn.Linear(16, 4), lambda z, y: F.cross_entropy(head(z), y), {"loss_fn.head": head}


def _method() -> Any:
    criterion = Criterion()
    return nn.Linear(16, 4), criterion.loss, {"loss_fn.head": criterion.head}


def _partial() -> Any:
    beside = nn.Module()
    beside.head, beside.scale = nn.Linear(4, 4), nn.Parameter(torch.ones(1))
    call = functools.partial(_with_scale, beside.head, beside.scale)
    return nn.Linear(16, 4), call, {"loss_fn.0": beside.head, "loss_fn": beside}


@pytest.mark.slow
@pytest.mark.parametrize("build", [_closure, _method])
def test_modules_that_a_loss_function_uses_are_trained(build: Callable[[], Any]) -> None:
    meshes = {name: frontier.LAYOUTS[name] for name in ("dp1", "dp2 x tp2")}
    frontier.trains_equally(build, (X, Y), meshes=meshes)
    model, loss_fn, _ = build()
    program = quintnet.compile(model, Mesh(dp=1), (X, Y), loss_fn=loss_fn)
    assert "loss_fn.head.weight" in dict(program.named_parameters())


def test_a_tensor_that_requires_a_gradient_and_is_no_parameter_is_named() -> None:
    scale = torch.ones(4, requires_grad=True)
    with pytest.raises(quintnet.CompileError, match=r"shape \[4\] requires a gradient") as caught:
        quintnet.compile(nn.Linear(16, 4), Mesh(dp=1), (X, Y), loss_fn=lambda z, y: F.cross_entropy(z * scale, y))
    assert "z * scale" in caught.value.where.source


def test_autocast_around_a_step_is_refused_and_what_the_error_offers_works() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = float(F.cross_entropy(model(X), Y).detach())
        program = quintnet.compile(model, Mesh(dp=2), (X, Y), loss_fn=F.cross_entropy, precision="bf16")
        with pytest.raises(quintnet.CompileError, match="QN105") as caught:
            program.step((X, Y))
    assert "bf16" in str(caught.value) and abs(float(program.step((X, Y)).detach()) - plain) < 1e-2


def test_a_head_that_one_program_trains_can_be_traced_again() -> None:
    head = nn.Linear(4, 4)
    batch = torch.randn(8, 16), torch.randint(4, (8,))
    losses = [
        quintnet.compile(model, Mesh(dp=2), batch, loss_fn=lambda z, y: F.cross_entropy(head(z), y)).step(batch)
        for model in [nn.Linear(16, 4)] * 2
    ]
    assert torch.equal(*losses)
