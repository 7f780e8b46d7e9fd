"""Code that is replaced between two steps: classes, their special methods, and functions of torch."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet

LAYOUTS: list[dict[str, Any]] = [{"dp": 2}, {"tp": 2}, {"pp": 2, "microbatches": 2}, {"dp": 2, "tp": 2, "zero": 3}]


class Scale:
    """Read by its special methods alone."""

    k = 1.5

    def __float__(self) -> float:
        return self.k


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.scale: Scale = type("OwnScale", (Scale,), {})()
        self.config = types.SimpleNamespace(act=torch.sigmoid)

    def forward(self, x: Tensor) -> Tensor:
        x = Same.apply(self.norm(self.first(x).tanh()))  # type: ignore[no-untyped-call]
        return self.config.act(self.last(x @ torch.eye(8, dtype=x.dtype) * float(self.scale)))  # type: ignore[no-any-return]


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Other(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).sin())  # type: ignore[no-any-return]


class OtherScale(Scale):
    k = 2.5


CALL: Callable[..., Any] = nn.Module.__call__


def _doubles_linears(self: nn.Module, *args: Any) -> Any:
    result = CALL(self, *args)
    return result * 2 if isinstance(self, nn.Linear) else result


def _double_call(self: nn.Module, *args: Any) -> Any:
    return CALL(self, *args) * 2


def _partial(model: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    scaled = functools.partial(F.linear, weight=model.first.weight, bias=None)
    monkeypatch.setattr(model.first, "forward", scaled)


def _bound(model: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "forward", types.MethodType(Other.forward, model))


class Asks(Net):
    """Asks what torch is set to."""

    def forward(self, x: Tensor) -> Tensor:
        exact = torch.are_deterministic_algorithms_enabled() or torch.get_float32_matmul_precision() == "high"
        return super().forward(x) * (2 if exact or torch.backends.cudnn.benchmark else 1)


SWITCHES: dict[str, Callable[[Any], None]] = {
    "deterministic algorithms": torch.use_deterministic_algorithms,
    "precision of products": lambda on: torch.set_float32_matmul_precision("high" if on else "highest"),
    "a backend": torch._C._set_cudnn_benchmark,  # also where torch.testing froze the public flag
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("switch", SWITCHES)
def test_what_torch_is_set_to_between_steps(switch: str) -> None:
    model, batch = Asks(), (torch.randn(8, 6), torch.randint(0, 4, (8,)))
    program = quintnet.compile(model, quintnet.Mesh(dp=2), batch, loss_fn=F.cross_entropy, check="off")
    for on in (False, True, False):
        SWITCHES[switch](on)
        try:
            plain = float(F.cross_entropy(model(batch[0]), batch[1]).detach())
            assert float(program.step(batch)) == pytest.approx(plain, abs=1e-5)
        finally:
            SWITCHES[switch](False)


Change = Callable[[Net, pytest.MonkeyPatch], None]
CHANGES: dict[str, Change] = {
    "the class of the model": lambda model, patch: patch.setattr(model, "__class__", Other),
    "the class of a part": lambda model, patch: patch.setattr(model.first, "__class__", Doubled),
    "the class of an object": lambda model, patch: patch.setattr(model.scale, "__class__", OtherScale),
    "bases of a class": lambda model, patch: setattr(type(model.scale), "__bases__", (OtherScale,)),
    "a derivative": lambda model, patch: patch.setattr(Same, "backward", staticmethod(lambda ctx, g: g * 2)),
    "an operator of tensors": lambda model, patch: patch.setattr(Tensor, "__matmul__", lambda a, b: torch.mm(a, b) * 2),
    "a special method": lambda model, patch: patch.setattr(Scale, "__float__", lambda self: 2.5),
    "a call of a class that had none": lambda model, patch: patch.setattr(Net, "__call__", _double_call, raising=False),
    "calls of all modules": lambda model, patch: patch.setattr(nn.Module, "__call__", _doubles_linears),
    "forward of a class of torch": lambda model, patch: patch.setattr(
        nn.LayerNorm, "forward", lambda self, x: x * self.weight
    ),
    "a function of torch": lambda model, patch: patch.setattr(F, "layer_norm", lambda x, *_: x * 2),
    "a method of tensors": lambda model, patch: patch.setattr(Tensor, "tanh", lambda x: x.sin()),
    "a function that an object holds": lambda model, patch: patch.setattr(model.config, "act", torch.sin),
    "forward of a part by a partial": _partial,
    "forward of the model by a method": _bound,
}


def _losses(change: Change, layout: dict[str, Any] | None) -> list[float]:
    model = Net().double()
    batch = (torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 4, (8,)))
    axes = {name: size for name, size in (layout or {}).items() if name in ("dp", "tp", "pp")}
    options = {name: x for name, x in (layout or {}).items() if name not in axes}
    with pytest.MonkeyPatch.context() as patch:
        if layout is None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        else:
            program = quintnet.compile(
                model, quintnet.Mesh(**axes), batch, loss_fn=F.cross_entropy, check="off", **options
            )
            optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
        losses: list[float] = []
        for step in range(4):
            if step == 2:
                change(model, patch)
            optimizer.zero_grad()
            loss = program.step(batch) if layout else F.cross_entropy(model(batch[0]), batch[1])
            if not layout:
                loss.backward()
            losses.append(float(loss.detach()))
            optimizer.step()
    return losses


@pytest.mark.sample(14)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_code_that_is_replaced_between_steps(change: str, layout: dict[str, Any]) -> None:
    plain = _losses(CHANGES[change], None)
    assert _losses(CHANGES[change], layout) == pytest.approx(plain, abs=1e-9)


@pytest.mark.parametrize(
    ("place", "name"), [(F, "layer_norm"), (Tensor, "tanh")], ids=["a function", "a method of tensors"]
)
def test_a_replacement_that_calls_the_original_is_refused(
    place: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(place, name)
    monkeypatch.setattr(place, name, lambda *args, **more: original(*args, **more) * 2)
    batch = (torch.randn(8, 6), torch.randint(0, 4, (8,)))
    with pytest.raises(quintnet.CompileError, match=r"QN105.*\n.*replaced by .*calls the original"):
        quintnet.compile(Net(), quintnet.Mesh(dp=2), batch, loss_fn=F.cross_entropy)
