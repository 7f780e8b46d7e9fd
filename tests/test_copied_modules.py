"""Copies of a compiled module, averages of its parameters, and values that are swapped in and out."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

import quintnet

STEPS = 3
LAYOUTS: list[dict[str, Any]] = [
    {"dp": 2}, {"dp": 2, "zero": 2}, {"dp": 2, "zero": 1}, {"dp": 2, "zero": 3}, {"tp": 2}, {"pp": 2},
]  # fmt: skip
Losses = list[float]


def _net() -> nn.Module:
    torch.manual_seed(0)  # 65 is odd: parts have padding
    return nn.Sequential(nn.Linear(16, 65), nn.BatchNorm1d(65), nn.Tanh(), nn.Linear(65, 4)).double()


def _batch(number: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(8, 16, generator=generator, dtype=torch.float64), torch.arange(8) % 4


class _Plain:
    """A module without a program: what a loop asks of a program."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def step(self, batch: tuple[Tensor, Tensor]) -> float:
        loss = F.cross_entropy(self.module(batch[0]), batch[1])
        loss.backward()
        return float(loss.detach())

    @torch.no_grad()
    def evaluate(self, batch: tuple[Tensor, Tensor]) -> float:
        self.module.eval()
        loss = float(F.cross_entropy(self.module(batch[0]), batch[1]))
        self.module.train()
        return loss


def _mine(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if not p.is_meta]


def _swapped_by_data(program: Any, model: nn.Module) -> Losses:
    """A hand-written average, that is swapped in for evaluation and out again."""
    optimizer = torch.optim.SGD(_mine(model), lr=0.1)
    averages = [p.detach().clone() for p in _mine(model)]
    losses = []
    for step in range(STEPS):
        losses.append(float(program.step(_batch(step))))
        optimizer.step()
        optimizer.zero_grad()
        for average, p in zip(averages, _mine(model), strict=True):
            average.mul_(0.5).add_(p.detach(), alpha=0.5)
        kept = [p.data for p in _mine(model)]
        for average, p in zip(averages, _mine(model), strict=True):
            p.data = average
        losses.append(float(program.evaluate(_batch())))
        for values, p in zip(kept, _mine(model), strict=True):
            p.data = values
        losses.append(float(program.evaluate(_batch())))
    return losses


def _averaged_model(program: Any, model: nn.Module) -> Losses:
    """As pages recommend; its values go back by load_state_dict."""
    optimizer = torch.optim.SGD(_mine(model), lr=0.1)
    average = AveragedModel(model, avg_fn=get_ema_avg_fn(0.5))  # type: ignore[no-untyped-call]
    losses = []
    for step in range(STEPS):
        losses.append(float(program.step(_batch(step))))
        if step == 1:
            copied = copy.deepcopy(average)  # while there are gradients
            assert all(p.grad is None for p in copied.parameters())
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(model)
    own = copy.deepcopy(model.state_dict())
    model.load_state_dict(average.module.state_dict())
    losses.append(float(program.evaluate(_batch())))
    model.load_state_dict(own)
    losses.append(float(program.evaluate(_batch())))
    model.load_state_dict(copied.module.state_dict())
    return [*losses, float(program.evaluate(_batch()))]


def _copied_and_pickled(program: Any, model: nn.Module) -> Losses:
    """Copies hold what the module held when they were made, also with gradients; pickles give the same values."""
    optimizer = torch.optim.SGD(_mine(model), lr=0.1)
    program.step(_batch())
    copied, stream = copy.deepcopy(model), io.BytesIO()
    grads = copy.deepcopy([p.grad for p in _mine(model)])
    torch.save(model.state_dict(), stream)
    whole = pickle.loads(pickle.dumps(model))
    optimizer.step()
    losses = [float(program.evaluate(_batch()))]
    stream.seek(0)
    read = torch.load(stream, weights_only=False)
    for state in (copied.state_dict(), read, whole.state_dict()):
        model.load_state_dict(state)
        losses.append(float(program.evaluate(_batch())))
    for p, grad in zip(_mine(model), grads, strict=True):
        p.data.sub_(grad, alpha=0.2)  # type: ignore[arg-type]
    return [*losses, float(program.evaluate(_batch()))]


def _moved_where_it_is(program: Any, model: nn.Module) -> Losses:
    """The module is moved to the device that it is on, and gets the dtype that it has, as other libraries do."""
    optimizer = torch.optim.SGD(_mine(model), lr=0.1)
    losses = []
    for step in range(STEPS):
        losses.append(float(program.step(_batch(step))))
        model.double()  # while there are gradients
        if not any(p.is_meta for p in model.parameters()):
            model.to("cpu").cpu()
        optimizer.step()
        optimizer.zero_grad()
    for p in _mine(model):
        p.data = torch.ones_like(p.detach())
    return [*losses, float(program.evaluate(_batch()))]


LOOPS: list[Callable[[Any, nn.Module], Losses]] = [
    _swapped_by_data,
    _averaged_model,
    _copied_and_pickled,
    _moved_where_it_is,
]


def _losses(layout: dict[str, Any]) -> list[Losses]:
    """Each loop begins with the first values, whatever the loop before it did with the one program that they share."""
    options = {key: size for key, size in layout.items() if key == "zero"}
    mesh, model = quintnet.Mesh(**{key: size for key, size in layout.items() if key != "zero"}), _net()
    program = quintnet.compile(model, mesh, _batch(), loss_fn=F.cross_entropy, check="off", **options)
    first, losses = copy.deepcopy(model.state_dict()), []
    for loop in LOOPS:
        model.load_state_dict(first)
        for p in _mine(model):
            p.grad = None
        losses.append(loop(program, model))
    program.close()
    return losses


def _in_processes(layouts: list[dict[str, Any]]) -> list[list[Losses]]:
    return [_losses(layout) for layout in layouts]


def _expected() -> list[Losses]:
    return [loop(_Plain(model), model) for loop in LOOPS for model in (_net(),)]


def _assert_equal(found: list[Losses], expected: list[Losses], layout: dict[str, Any]) -> None:
    for loop, ours, theirs in zip(LOOPS, found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9), (loop.__name__, layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [LAYOUTS[3:5], pytest.param([*LAYOUTS[:3], *LAYOUTS[5:]], marks=pytest.mark.slow)],
    ids=["zero 3, tp", "zero 0, 1 and 2, pp"],
)
def test_copies_and_averages_are_those_of_plain_pytorch_in_processes(layouts: list[dict[str, Any]]) -> None:
    expected = _expected()
    for rank in quintnet.launch(_in_processes, 2, (layouts,), timeout=400):
        for layout, found in zip(layouts, rank, strict=True):
            _assert_equal(found, expected, layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [*LAYOUTS, {"dp": 2, "tp": 2, "zero": 3}], ids=str)
def test_copies_and_averages_are_those_of_plain_pytorch(layout: dict[str, Any]) -> None:
    _assert_equal(_losses(layout), _expected(), layout)


def _saved_after_assignment(folder: str) -> list[float]:
    """What a checkpoint has that is written between an assignment and the next run."""
    model = _net()
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 2
    program = quintnet.compile(model, quintnet.Mesh(dp=ranks), _batch(), loss_fn=F.cross_entropy, zero=1, check="off")
    program.step(_batch())
    for p in model.parameters():
        p.data = torch.full_like(p.data, 2.0)
    program.save(folder, step=1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.zeros_like(p))
    program.load(folder)
    return [float(p.detach().full_tensor().mean()) for p in model.parameters()]  # type: ignore[attr-defined]


@pytest.mark.slow
def test_what_was_assigned_is_saved() -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert quintnet.launch(_saved_after_assignment, 2, (folder,), timeout=120) == [[2.0] * 6] * 2
    with tempfile.TemporaryDirectory() as folder:
        assert _saved_after_assignment(folder) == [2.0] * 6


def _refused() -> list[str]:
    model = nn.Linear(4, 2)
    batch = torch.randn(4, 4), torch.randn(4, 2)
    quintnet.compile(model, quintnet.Mesh(tp=2), batch, loss_fn=F.mse_loss, check="off").step(batch)
    weight, texts = model.weight, []
    assert isinstance(weight, DTensor)
    for x in (torch.ones(2, 4), weight.detach().double(), weight.full_tensor()):
        with pytest.raises(quintnet.RunError) as error:
            weight.data = x
        texts.append(str(error.value))
    model.load_state_dict({"weight": torch.ones(2, 4), "bias": torch.zeros(2)})  # the fix of the first
    assert bool((weight.full_tensor() == 1).all())
    return texts


def test_what_cannot_be_assigned_is_refused() -> None:
    plain, double, _ = quintnet.launch(_refused, 2, timeout=120)[0]
    assert "QN112" in plain
    assert "was set to a tensor [2, 4] that is no DTensor" in plain
    assert "load_state_dict(state)" in plain
    assert "torch.float64" in double
