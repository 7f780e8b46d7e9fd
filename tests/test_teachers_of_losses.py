"""A frozen teacher that a loss uses, or that a model hides: changes between two steps are followed as in plain PyTorch,
or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.arange(8) % 4
LAYOUTS: dict[str, dict[str, int]] = {"dp2": {"dp": 2}, "tp2": {"tp": 2}, "pp2": {"pp": 2}}


class Student(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.b(self.a(x).tanh()), x


def _teacher() -> Any:
    torch.manual_seed(2)
    parts = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)]
    return nn.Sequential(*parts).double().requires_grad_(False).eval()


class OfModule(nn.Module):
    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.teacher = teacher

    def forward(self, out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        return F.cross_entropy(out[0], y) + F.mse_loss(out[0], self.teacher(out[1]))


class InList:
    def __init__(self, teacher: nn.Module) -> None:
        self.teachers = [teacher]

    def __call__(self, out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        return F.cross_entropy(out[0], y) + F.mse_loss(out[0], self.teachers[0](out[1]))


def _closure(teacher: nn.Module) -> Callable[..., Tensor]:
    def loss(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(out[1])
        return F.cross_entropy(out[0], y) + F.mse_loss(out[0], wanted)

    return loss


def _assign(teacher: Any) -> None:
    teacher.load_state_dict({name: x * 2 for name, x in teacher.state_dict().items()}, assign=True)


def _data(teacher: Any) -> None:
    teacher[0].weight.data = teacher[0].weight.data * 2


HOLDERS: dict[str, Callable[[nn.Module], Any]] = {"closure": _closure, "module": OfModule, "list": InList}
FOLLOWED: dict[str, Callable[[Any], Any]] = {
    "another activation": lambda t: t.__setitem__(2, nn.ReLU()),
    "one more part without parameters": lambda t: t.append(nn.Tanh()) and None,
    "training": lambda t: t.train(),
    "a part that trains": lambda t: t[1].train(),
    "eps": lambda t: setattr(t[1], "eps", 0.5),
    "a hook": lambda t: t[0].register_forward_hook(lambda module, inputs, output: output * 2),
    "another parameter": lambda t: setattr(t[0], "weight", nn.Parameter(t[0].weight * 2, requires_grad=False)),
    "data": _data,
    "in place": lambda t: t[0].weight.mul_(2),
    "another buffer": lambda t: setattr(t[1], "running_mean", torch.ones(8).double()),
    "other values": _assign,
    "a method": lambda t: setattr(t[0], "forward", lambda x: F.linear(x, t[0].weight)),
}
REFUSED: dict[str, Callable[[Any], Any]] = {
    "another layer": lambda t: t.__setitem__(0, nn.Linear(6, 8).double().requires_grad_(False)),
    "parameters with other names": lambda t: t.insert(3, nn.ReLU()) and None,
    "one more layer": lambda t: t.append(nn.Linear(4, 4).double().requires_grad_(False)),
}


def _trained(model: Any, loss_of: Callable[[], Tensor], change: Callable[[], Any]) -> tuple[list[float], list[Tensor]]:
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), list[float]()
    for step in range(3):
        if step == 1:
            change()
        losses.append(float(loss_of().detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.detach().clone() for p in model.parameters()]


PLACES = [*(("closure", layout) for layout in LAYOUTS), ("module", "dp2"), ("list", "dp2")]


@pytest.mark.slow
@pytest.mark.parametrize(("holder", "layout"), PLACES)
@pytest.mark.parametrize("name", FOLLOWED)
def test_a_change_is_followed(name: str, holder: str, layout: str) -> None:
    plain, teacher = Student().double(), _teacher()
    loss = HOLDERS[holder](teacher)

    def backward() -> Tensor:
        value = loss(plain(X), Y)
        value.backward()
        return value  # type: ignore[no-any-return]

    expected, parameters = _trained(plain, backward, lambda: FOLLOWED[name](teacher))
    model, ours = Student().double(), _teacher()
    program = quintnet.compile(model, quintnet.Mesh(**LAYOUTS[layout]), (X, Y), loss_fn=HOLDERS[holder](ours))
    losses, trained = _trained(model, lambda: program.step((X, Y)), lambda: FOLLOWED[name](ours))
    assert losses == pytest.approx(expected, rel=1e-9)
    assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(trained, parameters, strict=True))
    assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(ours.buffers(), teacher.buffers(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("name", REFUSED)
def test_a_part_that_brings_parameters_is_refused(name: str, holder: str) -> None:
    model, teacher = Student().double(), _teacher()
    loss = HOLDERS[holder](teacher)
    program = quintnet.compile(model, quintnet.Mesh(dp=2), (X, Y), loss_fn=loss)
    program.step((X, Y))
    REFUSED[name](teacher)
    with pytest.raises(quintnet.CompileError, match=r"(?s)QN112.*no parameter for loss_fn.*fix: compile the module"):
        program.step((X, Y))
    again = quintnet.compile(copy.deepcopy(model), quintnet.Mesh(dp=2), (X, Y), loss_fn=loss)
    assert torch.allclose(again.step((X, Y)), loss(model(X), Y), rtol=1e-9)


@pytest.mark.slow
def test_a_number_of_rows_that_did_not_change_is_no_cause() -> None:
    model, teacher = Student().double(), _teacher()
    loss = lambda out, y: F.cross_entropy(out[0], y) + F.mse_loss(out[0], teacher(X))  # noqa: E731
    program = quintnet.compile(model, quintnet.Mesh(dp=2), (X, Y), loss_fn=loss)
    REFUSED["another layer"](teacher)
    with pytest.raises(quintnet.CompileError, match="QN112") as error:
        program.step((X, Y))
    assert "rows" not in str(error.value)


class Hiding(Student):
    """Adds what a teacher says that is no part of the model."""

    def __init__(self, teacher: nn.Module, holder: str) -> None:
        super().__init__()
        self.teachers: list[nn.Module] = []
        self.teacher: Any
        if holder == "list":
            self.teachers = [teacher]
        else:
            object.__setattr__(self, "teacher", teacher)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.teachers[0] if self.teachers else self.teacher
        return super().forward(x)[0] + hidden(x), x


def _of_logits(out: tuple[Tensor, Tensor], y: Tensor) -> Tensor:
    return F.cross_entropy(out[0], y)


HIDDEN = {name: change for name, change in (FOLLOWED | REFUSED).items() if "train" not in name}
HIDDEN_PLACES = [("list", "dp2"), ("list", "pp2"), ("attribute", "tp2")]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("holder", "layout"), HIDDEN_PLACES)
@pytest.mark.parametrize("name", HIDDEN)
def test_a_change_of_a_hidden_teacher_is_followed(name: str, holder: str, layout: str) -> None:
    teacher = _teacher()
    plain = Hiding(teacher, holder).double()

    def backward() -> Tensor:
        value = _of_logits(plain(X), Y)
        value.backward()
        return value

    expected, parameters = _trained(plain, backward, lambda: HIDDEN[name](teacher))
    ours = _teacher()
    model = Hiding(ours, holder).double()
    program = quintnet.compile(model, quintnet.Mesh(**LAYOUTS[layout]), (X, Y), loss_fn=_of_logits)
    losses, trained = _trained(model, lambda: program.step((X, Y)), lambda: HIDDEN[name](ours))
    assert losses == pytest.approx(expected, rel=1e-9)
    assert all(torch.allclose(a, b, rtol=1e-9) for a, b in zip(trained, parameters, strict=True))


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["training", "a part that trains"])
def test_a_hidden_teacher_whose_buffers_change_is_refused(name: str) -> None:
    teacher = _teacher()
    program = quintnet.compile(Hiding(teacher, "list").double(), quintnet.Mesh(dp=2), (X, Y), loss_fn=_of_logits)
    program.step((X, Y))
    FOLLOWED[name](teacher)
    buffers = [b.clone() for b in teacher.buffers()]
    with pytest.raises(quintnet.CompileError, match=r"(?s)QN110.*in place that is neither a buffer"):
        program.step((X, Y))
    assert all(torch.equal(a, b) for a, b in zip(buffers, teacher.buffers(), strict=True))
