"""Lazy modules: materialised before capture as their first call would, or refused before anything has changed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

import quintnet
from quintnet import Mesh

BATCH = torch.randn(8, 3, 6, 6, dtype=torch.float64), torch.randn(8, 2, dtype=torch.float64)


class Scale(LazyModuleMixin, nn.Module):  # type: ignore[misc]
    """A user's own, which stays of its class, has a parameter of a known size, and draws numbers of three kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.known = nn.UninitializedParameter(), nn.Parameter(torch.ones(1))
        self.register_buffer("shift", nn.UninitializedBuffer())

    def initialize_parameters(self, x: Tensor) -> None:
        if self.has_uninitialized_params():
            self.weight.materialize(x.flatten(1).shape[1:])
            self.shift.materialize((1,))
            with torch.no_grad():
                self.weight.normal_()
                self.shift.fill_(random.random())
                self.known.uniform_()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.shift * self.known


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.LazyBatchNorm2d(), nn.LazyConv2d(4, 3)
        self.scale, self.head, self.calls = Scale(), nn.LazyLinear(2), 0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.scale(self.norm(self.conv(x)).relu().flatten(1)).tanh())


def made(net: Callable[[], nn.Module], seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    random.seed(seed)
    return net().double()


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(dp=2), Mesh(tp=2), Mesh(pp=2)], ids=str)
def test_three_steps_are_those_of_the_plain_module(mesh: Mesh) -> None:
    plain, module = made(Net), made(Net)
    theirs = torch.optim.SGD(plain.parameters(), 0.1)
    losses = []
    for _ in range(3):
        theirs.zero_grad()
        loss = nn.functional.mse_loss(plain(BATCH[0]), BATCH[1])
        loss.backward()
        theirs.step()
        losses.append(loss.detach())
    module = made(Net)
    ours = torch.optim.SGD(module.parameters(), 0.1)
    program = quintnet.compile(module, mesh, BATCH, loss_fn=nn.functional.mse_loss)
    for loss in losses:
        ours.zero_grad()
        torch.testing.assert_close(torch.as_tensor(float(program.step(BATCH)), dtype=torch.float64), loss)
        ours.step()
    torch.testing.assert_close(dict(program.state_dict()), dict(plain.state_dict()))
    assert [type(m) for m in module.modules()] == [type(m) for m in plain.modules()]


def test_values_are_those_of_a_first_call_and_nothing_else_changes() -> None:
    plain, module = made(Net), made(Net)
    made(lambda: nn.Module())
    plain.eval()(BATCH[0])
    after = torch.get_rng_state(), random.getstate()
    made(lambda: nn.Module())
    quintnet.compile(module, Mesh(dp=2), BATCH, loss_fn=nn.functional.mse_loss, check="off")
    for name, x in plain.state_dict().items():
        assert torch.equal(x, module.state_dict()[name]), name  # BatchNorm has counted nothing
    assert torch.equal(after[0], torch.get_rng_state()) and after[1] == random.getstate()
    assert [vars(m).keys() for m in module.modules()] == [vars(m).keys() for m in plain.modules()]
    assert all(m.training for m in module.modules())


class Data(LazyModuleMixin, nn.Module):  # type: ignore[misc]
    """Takes its parameter's values from its first input, in ways that ``take`` has."""

    def __init__(self, take: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.take = nn.UninitializedParameter(), take

    def initialize_parameters(self, x: Tensor) -> None:
        if self.has_uninitialized_params():
            with torch.no_grad():
                self.take(self, x)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def copies(module: Any, x: Tensor) -> None:
    module.weight.materialize(x.shape[1:])
    module.weight.copy_(x.std(0))


def puts(module: Any, x: Tensor) -> None:
    module.weight = nn.Parameter(x.std(0))


def assigns(module: Any, x: Tensor) -> None:
    module.weight.materialize(x.shape[1:])
    module.weight.data = x.std(0)


def keeps(module: Any, x: Tensor) -> None:
    module.weight.materialize(x.shape[1:])
    module.first = x


def asks(module: Any, x: Tensor) -> None:
    module.weight.materialize(x.shape[1:])
    module.weight.fill_(x.std().item())


KEPT: list[Tensor] = []


def held(x: Tensor) -> None:
    KEPT.append(x)


class Outside(nn.Module):
    """A function that holds the module itself calls a lazy part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LazyLinear(4), nn.LazyLinear(1)
        self.call = lambda x: self.first(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.call(x))


class ByValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.LazyLinear(4), nn.LazyLinear(1)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        KEPT.append(x)
        x = self.first(x)
        return self.last(x if x.sum() > 0 else -x)


@pytest.mark.parametrize(
    "net",
    [*(lambda take=take: nn.Sequential(nn.LazyLinear(4), Data(take)) for take in (copies, puts, assigns, keeps, asks)),
     Outside, ByValue],
    ids=["copies", "puts", "assigns", "keeps", "asks", "outside", "by_value"],
)  # fmt: skip
def test_refused_before_anything_changes(net: Callable[[], nn.Module]) -> None:
    module, batch = made(net), (torch.randn(8, 3, dtype=torch.float64), torch.randn(8, 1, dtype=torch.float64))
    before = [(type(m), dict(vars(m)), dict(m._parameters)) for m in module.modules()]
    state = torch.get_rng_state()
    with pytest.raises(
        quintnet.CompileError, match=r"QN101.*\n  lazy modules have no shapes yet: \w+.*\n.*run one forward first"
    ):
        quintnet.compile(module, Mesh(dp=2), batch, loss_fn=nn.functional.mse_loss)
    assert not KEPT and torch.equal(state, torch.get_rng_state())
    for m, (kind, attributes, parameters) in zip(module.modules(), before, strict=True):
        assert type(m) is kind and vars(m) == attributes and all(m._parameters[n] is x for n, x in parameters.items())
        assert all(nn.parameter.is_lazy(x) for x in m.parameters())


def test_the_fix_that_the_error_names() -> None:
    module = made(lambda: nn.Sequential(nn.LazyLinear(4), Data(copies), nn.Linear(4, 1)))
    batch = torch.randn(8, 3, dtype=torch.float64), torch.randn(8, 1, dtype=torch.float64)
    with torch.no_grad():
        module.eval()(*batch[:1])
    module.train()
    loss = nn.functional.mse_loss(module(batch[0]), batch[1]).detach()
    program = quintnet.compile(module, Mesh(dp=2), batch, loss_fn=nn.functional.mse_loss)
    torch.testing.assert_close(torch.as_tensor(float(program.step(batch)), dtype=torch.float64), loss)


def test_a_part_that_forward_does_not_call() -> None:
    module = nn.Sequential(nn.LazyLinear(4))
    module[0].more = nn.LazyLinear(2)
    with pytest.raises(quintnet.CompileError, match=r"QN101.*\n  forward does not call lazy modules.*: 0.more"):
        quintnet.compile(module, Mesh(), (torch.randn(8, 3), torch.randn(8, 4)), loss_fn=nn.functional.mse_loss)
    assert all(nn.parameter.is_lazy(x) for x in module.parameters())


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.head(x), y)


def test_losses_and_loaded_values() -> None:
    plain, module = nn.Linear(3, 4), nn.LazyLinear(4)
    module.load_state_dict(plain.state_dict())
    loss, batch = Loss(), (torch.randn(8, 3), torch.randn(8, 1))
    program = quintnet.compile(module, Mesh(dp=2), batch, loss_fn=loss)
    assert type(module) is nn.Linear and module.in_features == 3 and type(loss.head) is nn.Linear
    torch.testing.assert_close(torch.as_tensor(float(program.step(batch))), loss(plain(batch[0]), batch[1]).detach())
