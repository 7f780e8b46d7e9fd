"""Changes between steps that replace what holds attributes, parts, parameters or hooks, or fill what was empty."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet

STEPS = 3


class Settings:
    """Has an attribute that forward reads."""

    def __init__(self) -> None:
        self.scale = 2.0


class Net(nn.Module):
    """Reads attributes, a buffer and parts, some of which are empty."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(4, 8), nn.Linear(8, 3)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.ReLU())
        self.more, self.named, self.empty = nn.ModuleList(), nn.ModuleDict(), nn.Sequential()
        self.weights, self.leaf = nn.ParameterList(), nn.ReLU()
        self.settings, self.scale = Settings(), 1.0
        self.register_buffer("shift", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(torch.tanh(self.inner(x))) * self.settings.scale * self.scale + self.shift
        for layer in (*self.more, *self.named.values()):
            x = layer(x)
        for weight in (*self.weights, *self.leaf.parameters()):
            x = x * weight
        return self.out(self.empty(x))  # type: ignore[no-any-return]


def _double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def _layer() -> nn.Module:
    torch.manual_seed(3)
    return nn.Linear(8, 8).double()


def _weight() -> nn.Parameter:
    return nn.Parameter(torch.full((8,), 2.0, dtype=torch.float64))


def _new_weights(net: Net) -> None:
    net.inner._parameters = {name: nn.Parameter(p.detach() * 2) for name, p in net.inner.named_parameters()}


def _all_hooks_removed(net: Net) -> None:
    for module in net.modules():
        module._forward_hooks = OrderedDict()


# what is done after the first step, and after the second; the compared copy was made before
CHANGES: dict[str, tuple[Callable[[Net], Any], Callable[[Net], Any]]] = {
    "an object's namespace": (
        lambda net: setattr(net.settings, "__dict__", {"scale": 3.0}),
        lambda net: setattr(net.settings, "scale", 5.0),
    ),
    "an object's namespace, equal": (
        lambda net: setattr(net.settings, "__dict__", dict(vars(net.settings))),
        lambda net: setattr(net.settings, "scale", 5.0),
    ),
    "a module's namespace": (
        lambda net: setattr(net, "__dict__", {**vars(net), "scale": 3.0}),
        lambda net: setattr(net, "scale", 5.0),
    ),
    "a module's namespace, equal": (
        lambda net: setattr(net, "__dict__", dict(vars(net))),
        lambda net: setattr(net, "scale", 5.0),
    ),
    "parts in another order": (
        lambda net: setattr(net.layers, "_modules", dict(reversed(net.layers._modules.items()))),
        lambda net: net.layers.append(nn.Tanh()),
    ),
    "parts, equal": (
        lambda net: setattr(net.layers, "_modules", dict(net.layers._modules)),
        lambda net: net.layers.append(nn.Tanh()),
    ),
    "buffers": (
        lambda net: setattr(net, "_buffers", {"shift": net.shift * 3}),
        lambda net: setattr(net, "shift", net.shift * 5),
    ),
    "parameters": (_new_weights, lambda net: net.inner.requires_grad_(False)),
    "parameters, equal": (
        lambda net: setattr(net.inner, "_parameters", dict(net.inner._parameters)),
        lambda net: setattr(net.inner, "weight", nn.Parameter(net.inner.weight.detach() * 2)),
    ),
    "no hooks any more": (lambda net: net.inner.register_forward_hook(_double), _all_hooks_removed),
    "hooks, equal": (_all_hooks_removed, lambda net: net.inner.register_forward_hook(_double)),
    "hooks": (
        lambda net: setattr(net.inner, "_forward_hooks", {7: _double}),
        lambda net: vars(net).update(_forward_pre_hooks={1: lambda module, args: (args[0] * 3,)}),
    ),
    "a layer in an empty list": (lambda net: net.more.append(nn.Tanh()), lambda net: net.more.append(_layer())),
    "a layer in an empty dict": (
        lambda net: net.named.update({"a": nn.Tanh()}),
        lambda net: net.named.update({"b": _layer()}),
    ),
    "a layer in an empty Sequential": (lambda net: net.empty.append(nn.Tanh()), lambda net: net.empty.append(_layer())),
    "parts of an empty list": (
        lambda net: setattr(net.more, "_modules", {"0": nn.Tanh()}),
        lambda net: setattr(net.more, "_modules", {"0": nn.Tanh(), "1": _layer()}),
    ),
    "a parameter in an empty list": (lambda net: None, lambda net: net.weights.append(_weight())),
    "parameters of a leaf": (lambda net: None, lambda net: setattr(net.leaf, "_parameters", {"0": _weight()})),
}  # fmt: skip
REFUSED_BY_THEIR_SECOND = {
    "a layer in an empty list", "a layer in an empty dict", "a layer in an empty Sequential", "parts of an empty list",
    "a parameter in an empty list", "parameters of a leaf",
}  # fmt: skip


@pytest.mark.sample(6)
@pytest.mark.parametrize("change", CHANGES)
def test_a_step_sees_what_was_replaced(change: str) -> None:
    torch.manual_seed(0)
    net = Net().double()
    plain = copy.deepcopy(net)
    batch = torch.randn(4, 4, dtype=torch.float64), torch.randint(0, 3, (4,))
    program = quintnet.compile(net, quintnet.Mesh(dp=2), batch, loss_fn=F.cross_entropy)
    for number in range(STEPS):
        for model in (net, plain):
            model.zero_grad()
        expected = F.cross_entropy(plain(batch[0]), batch[1])
        expected.backward()  # type: ignore[no-untyped-call]
        if number == STEPS - 1 and change in REFUSED_BY_THEIR_SECOND:
            with pytest.raises(quintnet.CompileError, match="QN112"):
                program.step(batch)
            return
        torch.testing.assert_close(program.step(batch), expected, atol=1e-9, rtol=1e-9)
        for p, q in zip(net.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, atol=1e-9, rtol=1e-9, check_layout=False)
        if number < 2:
            for model in (net, plain):
                CHANGES[change][number](model)
