"""Captures that tests share: of modules that are traced alike, and of no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet_compiler.capture.capture import capture
from quintnet_compiler.driver.captured_text import captured_text

from ..models import CASES, MLP, build
from ..shared_captures import SharedCaptures


class Net(nn.Module):
    def __init__(self, scale: float = 2.0, act: Callable[[Tensor], Tensor] = torch.tanh, bias: bool = True) -> None:
        super().__init__()
        self.layer, self.scale, self.act = nn.Linear(4, 4, bias=bias), scale, act
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            x = x * self.scale
        return (self.act(self.layer(x)) + self.shift).mean()


def _hooked(net: nn.Module) -> nn.Module:
    net.register_forward_hook(lambda module, inputs, result: 2 * result)
    return net


def _tied(net: MLP) -> MLP:
    net.ups[1].weight = net.ups[0].weight
    return net


X = (torch.ones(2, 4),)
OTHERS: dict[str, Callable[[], nn.Module]] = {
    "another number": lambda: Net(3.0),
    "another function": lambda: Net(act=torch.sigmoid),
    "a closure": lambda: Net(act=lambda y, by=X: y + by[0].sum()),
    "another dtype": lambda: Net().bfloat16(),
    "a part less": lambda: Net(bias=False),
    "another mode": lambda: Net().eval(),
    "a frozen parameter": lambda: Net().requires_grad_(False),
    "a hook": lambda: _hooked(Net()),
}


@pytest.mark.parametrize("name", ["mlp", "mixture"])
def test_a_module_that_is_like_another_gets_its_graph_with_its_own_tensors(name: str) -> None:
    shared, case = SharedCaptures(), CASES[name]
    first, second = build(name), build(name)
    one = shared(first, case.batch(4), case.loss_fn)
    two = shared(second, case.batch(4), case.loss_fn)
    assert shared.reused == 1 and two.graph is one.graph
    traced = capture(second, case.batch(4), case.loss_fn)
    assert captured_text(two) == captured_text(traced) and two.tensors.keys() == traced.tensors.keys()
    assert all(x is traced.tensors[name] for name, x in two.tensors.items())
    assert one.guards is None and two.guards is None


@pytest.mark.sample(4)
@pytest.mark.parametrize("other", OTHERS)
def test_what_is_traced_in_another_way_is_traced(other: str) -> None:
    shared = SharedCaptures()
    shared(Net(), X)
    changed = OTHERS[other]()
    x = (X[0].to(next(changed.parameters()).dtype),)
    assert captured_text(shared(changed, x)) == captured_text(capture(changed, x)) and not shared.reused


@pytest.mark.parametrize(
    "given",
    [((torch.ones(3, 4),), {}), (X, {"want": "outputs"}), (X, {"training": False}), ((X[0].double(),), {})],
    ids=["rows", "outputs", "evaluation", "dtype"],
)
def test_another_batch_or_wish_is_traced(given: tuple[Any, dict[str, Any]]) -> None:
    shared = SharedCaptures()
    shared(Net(act=torch.tanh), X)
    batch, options = given
    net = Net().to(batch[0].dtype)
    shared(net, batch, **options)
    assert not shared.reused and len(shared.kept) == 2


def test_ties_and_loss_functions_are_compared() -> None:
    shared, case = SharedCaptures(), CASES["mlp"]
    for model, loss_fn in (
        (MLP(), F.cross_entropy),
        (_tied(MLP()), F.cross_entropy),
        (MLP(), nn.CrossEntropyLoss()),
        (MLP(), nn.CrossEntropyLoss(label_smoothing=0.1)),
    ):
        shared(model.double(), case.batch(4), loss_fn)
    assert not shared.reused and len(shared.kept) == 4
    shared(MLP().double(), case.batch(4), nn.CrossEntropyLoss(label_smoothing=0.1))
    assert shared.reused == 1


def test_a_setting_of_torch_is_compared() -> None:
    shared = SharedCaptures()
    shared(Net(), X)
    torch.use_deterministic_algorithms(True)
    try:
        shared(Net(), X)
    finally:
        torch.use_deterministic_algorithms(False)
    assert not shared.reused


def test_programs_of_one_trace_train_their_own_modules(shared_captures: SharedCaptures) -> None:
    before = shared_captures.reused
    models = [build("mlp") for _ in range(2)]
    with torch.no_grad():
        models[1].head.weight.mul_(2.0)
    losses, case = [], CASES["mlp"]
    for model in models:
        program = quintnet.compile(model, quintnet.Mesh(dp=2), case.batch(4), loss_fn=case.loss_fn)
        losses.append(float(program.step(case.batch(4)).detach()))
        assert all(p.grad is not None for p in program.parameters())
    assert shared_captures.reused > before and losses[0] != losses[1]
    expected = [float(F.cross_entropy(m(case.batch(4)[0]), case.batch(4)[1]).detach()) for m in (build("mlp"),)]
    assert losses[0] == pytest.approx(expected[0], rel=1e-12)


class Drifting(nn.Linear):
    """Reads a number of its class, which is not among what is compared."""

    drift = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean() + self.drift


def test_a_graph_is_compared_with_the_first_module_that_has_it(
    shared_captures: SharedCaptures, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, batch = quintnet.Mesh(dp=2), (torch.ones(2, 4),)
    quintnet.compile(Drifting(4, 4), mesh, batch)
    monkeypatch.setattr(Drifting, "drift", 1.0)
    quintnet.compile(Drifting(4, 4), mesh, batch)
    with pytest.raises(quintnet.CompileError, match="QN111"):
        quintnet.compile(Drifting(4, 4), mesh, batch, check="always")
