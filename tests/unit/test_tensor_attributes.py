"""Attributes that users give to tensors, and what else forward reads of tensors in Python, between two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet_compiler.guards.columns import Values
from quintnet_compiler.guards.tensor_attributes import (
    gives_numbers,
    originals_of,
    stand_ins_of,
    writes_in_place,
)

LAYOUTS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 2}, {}),
    ({"tp": 2}, {}),
    ({"pp": 2}, {}),
    ({"dp": 2, "tp": 2}, {"zero": 3}),
]
TENSORS: dict[str, Callable[[Any], Tensor]] = {
    "parameter": lambda net: net.first.weight,
    "buffer": lambda net: net.buffer,
    "plain attribute": lambda net: net.plain,
    "in a list": lambda net: net.listed[0],
}
CHANGES: dict[str, Callable[[Tensor], None]] = {
    "number": lambda x: setattr(x, "scale", 2.5),
    "entry": lambda x: x.scales.update(k=3.0),  # type: ignore[attr-defined]
    "new": lambda x: setattr(x, "added", 2.5),
    "gone": lambda x: delattr(x, "scale"),
}


class Net(nn.Module):
    def __init__(self, tensor: Callable[[Any], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.register_buffer("buffer", torch.ones(8))
        self.plain, self.listed, self.tensor = torch.ones(8), [torch.ones(8)], tensor
        self.double()
        self.plain, self.listed[0] = self.plain.double(), self.listed[0].double()
        tensor(self).scale, tensor(self).scales = 1.5, {"k": 1.0}  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        at: Any = self.tensor(self)
        x = (self.first(x) * self.buffer * self.plain * self.listed[0]).tanh()
        return self.last(x) * getattr(at, "scale", 0.5) * at.scales["k"] * (at.added if hasattr(at, "added") else 1.0)


def _losses(tensor: str, layout: tuple[dict[str, int], dict[str, Any]] | None) -> list[float]:
    model = Net(TENSORS[tensor])
    batch = (torch.ones(8, 6).cumsum(0).double() / 8, torch.arange(8) % 4)
    if layout is None:
        step = lambda: F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    else:
        axes, options = layout
        program = quintnet.compile(model, quintnet.Mesh(**axes), batch, loss_fn=F.cross_entropy, **options)
        step = lambda: program.step(batch)  # noqa: E731
    losses = [float(step().detach())]
    for change in CHANGES.values():
        change(TENSORS[tensor](model))
        losses.append(float(step().detach()))
    return losses


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("tensor", TENSORS)
def test_attributes_of_tensors_are_followed(tensor: str, layout: tuple[dict[str, int], dict[str, Any]]) -> None:
    expected = _losses(tensor, None)
    assert len(set(expected)) == len(CHANGES) + 1
    assert _losses(tensor, layout) == pytest.approx(expected, abs=1e-9)


class OwnGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (2.0 if self.linear.bias.grad is None else 1.0)


def test_a_gradient_that_forward_reads_is_refused() -> None:
    batch = (torch.randn(8, 6), torch.randint(0, 4, (8,)))
    with pytest.raises(quintnet.CompileError, match=r"QN110[\s\S]*the gradient of 'linear.bias'[\s\S]*grad is None"):
        quintnet.compile(OwnGradient(), quintnet.Mesh(dp=2), batch, loss_fn=F.cross_entropy)


class Flagged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.plain = nn.Linear(6, 4), torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.plain * (2.0 if self.plain.requires_grad else 1.0)


def test_a_constant_that_begins_to_require_a_gradient_is_refused() -> None:
    batch = (torch.randn(8, 6), torch.randint(0, 4, (8,)))
    model = Flagged()
    program = quintnet.compile(model, quintnet.Mesh(dp=2), batch, loss_fn=F.cross_entropy)
    program.step(batch)
    model.plain.requires_grad_(True)
    with pytest.raises(quintnet.CompileError, match="QN105"):
        program.step(batch)


class Asks(nn.Module):
    """Reads values and numbers of tensors in Python."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.mask, self.memory = nn.Linear(6, 4), torch.tensor([True]), numpy.array([1.5])
        self.scale = torch.from_numpy(self.memory)

    def forward(self, x: Tensor) -> Tensor:
        factor = float(self.scale) * (2.0 if self.mask.tolist()[0] else 1.0)
        return self.linear(x) * factor * (1 + len(list(self.buffers())))


def _asked(mesh: dict[str, int] | None) -> list[float]:
    model = Asks()
    batch = (torch.ones(8, 6).cumsum(0) / 8, torch.arange(8) % 4)
    step: Callable[[], Tensor] = lambda: F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    if mesh is not None:
        program = quintnet.compile(model, quintnet.Mesh(**mesh), batch, loss_fn=F.cross_entropy)
        step = lambda: program.step(batch)  # noqa: E731
    losses = [float(step().detach())]
    changes: list[Callable[[], object]] = [
        lambda: model.mask.numpy().fill(False),
        lambda: model.memory.fill(4.0),
        lambda: model.mask.data.fill_(True),
        lambda: model.register_buffer("another", torch.ones(1)),
    ]
    for change in changes:
        change()
        losses.append(float(step().detach()))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_values_that_python_read_are_compared(mesh: dict[str, int]) -> None:
    expected = _asked(None)
    assert len(set(expected)) == 5
    assert _asked(mesh) == pytest.approx(expected, abs=1e-5)


def test_what_stands_for_a_tensor() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    originals = originals_of(model.named_modules())
    assert [original.place.path for original in originals][:2] == ["0.weight", "0.bias"] and len(originals) == 5
    assert not stand_ins_of(originals)
    before, other = model[0].running_mean, torch.zeros(2)
    model[0].running_mean = other
    assert [(key, x.tensor is before) for key, x in stand_ins_of(originals).items()] == [(id(other), True)]


def test_functions_of_tensors_by_what_they_do() -> None:
    assert gives_numbers(Tensor.item) and not gives_numbers(Tensor.sum)
    assert writes_in_place(Tensor.add_) and not writes_in_place(Tensor.detach_)


def test_values_are_compared_as_they_are() -> None:
    x = torch.tensor([1.0])
    guard = Values.of([x])
    assert guard.hold() and not guard.broken()
    x.numpy()[0] = 2.0
    assert not guard.hold() and guard.broken()


def test_values_that_are_no_numbers_are_what_they_were() -> None:
    """NaN differs from itself: a guard that says so would lead to a trace in every step."""
    x = torch.tensor([1.0, float("nan")])
    values = Values.of([x])
    assert values.hold()
    x[0] = 2.0
    assert not values.hold()
    x[0], x[1] = 1.0, 3.0
    assert not values.hold()
