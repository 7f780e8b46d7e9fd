"""Hooks of modules and parameters: equal to the plain module, or refused with the hook's line."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_full_backward_hook

import quintnet
from tests import frontier

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SEEN: list[int] = []
SPLIT: Mapping[str, Mapping[str, int]] = MappingProxyType({"dp2 x tp2": {"dp": 2, "tp": 2}, "pp2": {"pp": 2}})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh()).square().mean()  # type: ignore[no-any-return]


def net(hook: Callable[[Net], Any] = lambda _: None) -> Net:
    torch.manual_seed(0)
    model = Net().double()
    hook(model)
    return model


def _clipped(g: Tensor) -> Tensor:
    return g * torch.clamp(1e-3 / g.norm(), max=1.0)


MODULES: dict[str, Callable[[Net], Any]] = {
    "of what comes in": lambda m: m.last.register_full_backward_hook(lambda _, into, out: (into[0].sign() * 1e-2,)),
    "of both": lambda m: m.last.register_full_backward_hook(lambda _, into, out: (into[0] * _clipped(out[0]).sum(),)),
    "of what goes out": lambda m: m.first.register_full_backward_pre_hook(lambda _, out: (_clipped(out[0]),)),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODULES)
def test_backward_hooks_of_modules(name: str) -> None:
    frontier.trains_equally(lambda: net(MODULES[name]), (X,))


class Several(nn.Module):
    """Several inputs and results: one of each has no gradient, one is nested, one is nobody's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor, scale: Tensor, y: Tensor, factor: float) -> tuple[Any, ...]:
        z = self.inner(x * y) * factor
        return z, (z.cos(), scale), z.sin(), z.detach()


class Around(Net):
    def __init__(self, *, both: bool) -> None:
        super().__init__()
        self.several, self.both = Several(), both
        self.several.register_full_backward_hook(self.backward)
        self.several.register_full_backward_hook(lambda _, into, out: [None, None, into[2], None])
        self.several.register_full_backward_pre_hook(self.before)

    def backward(self, _: nn.Module, into: Any, out: Any) -> Any:
        assert into[1] is not None
        assert into[3] is out[1] is out[3] is None
        assert (out[2] is not None) == self.both
        return into[0], None, into[2] + into[0] * _clipped(out[0]).abs().sum(), None

    def before(self, _: nn.Module, out: Any) -> Any:
        assert out[1] is out[3] is None
        return out[0] / 3, None, None if out[2] is None else out[2] + out[0], None

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        found = self.several(h.tanh(), torch.ones(8, dtype=h.dtype), h.sin(), 2.0)
        return self.last(found[0] + (found[2] if self.both else 0) + found[3]).square().mean()  # type: ignore[no-any-return]


@pytest.mark.sample(1)
@pytest.mark.parametrize("both", [False, True])
def test_backward_hooks_of_modules_with_several_inputs_and_results(both: bool) -> None:
    def build() -> Around:
        torch.manual_seed(0)
        return Around(both=both).double()

    frontier.trains_equally(build, (X,), meshes=SPLIT)


def _returns_nothing(module: nn.Module, into: Any, out: Any) -> None:
    return None


@pytest.mark.parametrize(
    ("hook", "cause"),
    [
        (lambda m: m.last.register_full_backward_hook(_returns_nothing), "returns nothing.*\n.*last.*_returns_nothing"),
        (lambda m: m.first.register_full_backward_hook(lambda *_: None), "returns nothing.*\n.*first.*frontier_hooks"),
        (lambda m: m.last.register_full_backward_hook(lambda _, into, out: into[0]), "a tuple of 1"),
        (lambda m: m.last.register_backward_hook(lambda _, into, out: into), "register_backward_hook.*\n.*last"),
    ],
)
def test_backward_hooks_of_modules_that_nothing_follows_are_refused(hook: Any, cause: str) -> None:
    with pytest.raises(quintnet.CompileError, match=cause) as found:
        quintnet.compile(net(hook), quintnet.Mesh(dp=1), (X,))
    assert found.value.code == "QN105"


def test_backward_hooks_of_all_modules_are_refused() -> None:
    handle = register_module_full_backward_hook(lambda _, into, out: into)
    try:
        with pytest.raises(quintnet.CompileError, match="backward of all modules"):
            quintnet.compile(net(), quintnet.Mesh(dp=1), (X,))
    finally:
        handle.remove()


def _halved(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


def _signs(p: Tensor) -> None:
    assert p.grad is not None
    p.grad = _clipped(p.grad).sign()


def _post(model: Net) -> None:
    model.first.weight.register_post_accumulate_grad_hook(_halved)
    model.last.weight.register_post_accumulate_grad_hook(_signs)
    model.last.weight.register_post_accumulate_grad_hook(_halved)


def test_hooks_that_run_when_a_gradient_is_accumulated() -> None:
    frontier.trains_equally(lambda: net(_post), (X,))


def test_optimizers_in_the_backward() -> None:
    plain, model = net(), net()
    for one in (plain, model):
        for parameter in one.parameters():
            optimizer = torch.optim.AdamW([parameter], lr=0.1)

            def hook(p: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                p.grad = None

            parameter.register_post_accumulate_grad_hook(hook)
    program = quintnet.compile(model, quintnet.Mesh(dp=2), (X,))
    for _ in range(3):
        expected = plain(X)
        expected.backward()
        assert torch.allclose(program.step((X,)), expected, rtol=0, atol=1e-12)
        assert all(p.grad is None for p in model.parameters())
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(found, wanted, rtol=0, atol=1e-12)
    assert program.verify().ok


def test_such_hooks_see_what_was_accumulated_before() -> None:
    plain, model = net(_post), net(_post)
    program = quintnet.compile(model, quintnet.Mesh(dp=1), (X,))
    for _ in range(3):
        plain(X).backward()
        program.step((X,))
    for found, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert found.grad is not None
        assert wanted.grad is not None
        assert torch.allclose(found.grad, wanted.grad, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_hooks_of_what_a_loss_function_brings() -> None:
    def build() -> Any:
        torch.manual_seed(0)
        head = nn.Linear(8, 4).double()
        head.weight.register_hook(_clipped)
        head.weight.register_post_accumulate_grad_hook(_halved)
        head.register_full_backward_hook(lambda _, into, out: (into[0] * 3,))
        return nn.Linear(4, 8), lambda out, y: (head(out) - y).square().mean(), {"head": head}

    frontier.trains_equally(build, (X, X))


HOOKS: dict[str, Callable[[Net], Any]] = {
    "parameter": lambda m: m.first.weight.register_hook(lambda g: g * 3),
    "backward": lambda m: m.last.register_full_backward_hook(lambda _, into, out: (into[0] * 3,)),
    "backward pre": lambda m: m.last.register_full_backward_pre_hook(lambda _, out: (out[0] * 3,)),
    "forward": lambda m: m.last.register_forward_hook(lambda _, given, out: out * 3),
    "forward pre": lambda m: m.register_forward_pre_hook(lambda _, given: (given[0] * 3,)),
    "accumulated": lambda m: m.last.weight.register_post_accumulate_grad_hook(_halved),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_that_are_set_and_removed_after_compile(name: str) -> None:
    handles: dict[int, list[Any]] = {}

    def before(module: nn.Module, step: int) -> None:
        mine = handles.setdefault(id(module), [])
        if step == 1:
            assert isinstance(module, Net)
            mine.append(HOOKS[name](module))
        elif step == 2:
            mine.pop().remove()

    frontier.trains_equally(net, (X,), meshes={"dp2": {"dp": 2}}, before=before)


class Logged(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        SEEN.append(1)
        return 2 * grad


class Counted(Logged):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Counted.calls += 1
        return 2 * grad


class Noted(Logged):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        SEEN.append(1)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, grad: Tensor) -> Tensor:
        self.calls += 1
        return grad

    def of_module(self, _: nn.Module, into: Any, out: Any) -> Any:
        self.calls += 1
        return into


def _own_list(model: Net) -> None:
    norms: list[Tensor] = []

    def hook(grad: Tensor) -> Tensor:
        norms.append(grad.norm())
        return grad

    model.first.weight.register_hook(hook)


def _own_number(model: Net) -> None:
    times = 0

    def hook(_: nn.Module, out: Any) -> Any:
        nonlocal times
        times += 1
        return out

    model.last.register_full_backward_pre_hook(hook)


def _applied(function: Any) -> Callable[[Net], Any]:
    return lambda m: m.first.register_forward_hook(lambda _, given, out: function.apply(out))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("hook", "what", "line"),
    [
        (_applied(Logged), "the variable 'SEEN'", "SEEN.append"),
        (_applied(Noted), "the variable 'SEEN'", "SEEN.append"),
        (_applied(Counted), "the attribute 'Counted.calls'", "Counted.calls += 1"),
        (lambda m: m.first.weight.register_hook(Counter()), "the attribute 'Counter.calls'", "self.calls += 1"),
        (lambda m: m.last.register_full_backward_hook(Counter().of_module), "'Counter.calls'", "self.calls += 1"),
        (_own_list, "the variable 'norms'", "norms.append"),
        (_own_number, "the variable 'times' (from 0 to 1)", "times += 1"),
    ],
)
def test_derivatives_that_change_something_in_python_are_refused(hook: Any, what: str, line: str) -> None:
    match = (
        f"a derivative that is your own changes .*{re.escape(what)}(.|\n)*at: test_frontier_hooks.*{re.escape(line)}"
    )
    with pytest.raises(quintnet.CompileError, match=match) as found:
        quintnet.compile(net(hook), quintnet.Mesh(dp=1), (X,))
    assert found.value.code == "QN110"
    assert not SEEN
    assert not Counted.calls
