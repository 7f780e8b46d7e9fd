"""Loops with everything that people put around a step, beside the same loop in plain PyTorch: labels that do not count,
validation batches of unequal sizes, two metrics, the best checkpoint, early stopping, an average of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import quintnet

CLASSES, WIDTH, PATIENCE, EPOCHS, DECAY = 5, 8, 2, 8, 0.8
LAYOUTS: list[dict[str, Any]] = [{"dp": 2}, {"tp": 2}, {"pp": 2, "microbatches": 2}, {"dp": 2, "tp": 2, "zero": 3}]
State = dict[str, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


def _data(rows: int, seed: int) -> TensorDataset:
    """Some labels do not count: more of them in the first rows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    return TensorDataset(x, torch.where(torch.arange(rows) % 5 < 2 - torch.arange(rows) // 8, -100, labels))


TRAIN, VALIDATION = _data(24, 0), _data(13, 1)


def _loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    return DataLoader(TRAIN, batch_size=8), DataLoader(VALIDATION, batch_size=5)


def _second(outputs: Tensor, labels: Tensor) -> tuple[float, float]:
    """Whether the label is among the two largest logits."""
    counted = labels != -100
    among = (outputs.topk(2, -1).indices == labels[:, None]).any(-1)
    return float((among & counted).sum()), float(counted.sum())


METRICS: Mapping[str, Callable[[Any, Any], tuple[float, float]]] = {"accuracy": quintnet.accuracy, "second": _second}


@dataclass
class Around:
    """What a loop keeps around its steps: an average of parameters, and the best ones of a validation."""

    average: State = field(default_factory=dict)
    best: State = field(default_factory=dict)
    least: float = math.inf
    bad: int = 0

    def stepped(self, state: State) -> None:
        for name, x in state.items():
            if name in self.average:
                self.average[name].lerp_(x, 1 - DECAY)
            else:
                self.average[name] = x.clone()

    def validated(self, loss: float, state: State) -> bool:
        """Whether to stop."""
        if loss < self.least:
            self.least, self.best = loss, {name: x.clone() for name, x in state.items()}
        self.bad = 0 if loss == self.least else self.bad + 1
        return self.bad >= PATIENCE


@dataclass
class Told:
    """What a run has to show: losses of steps, validations, and those of the best and of the average parameters."""

    losses: list[float] = field(default_factory=list)
    validations: list[dict[str, float]] = field(default_factory=list)
    best: dict[str, float] = field(default_factory=dict)
    average: dict[str, float] = field(default_factory=dict)


def _plain() -> Told:
    model, told, around = Net().double(), Told(), Around()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train, validation = _loaders()

    def validate() -> dict[str, float]:
        sums = {"loss": 0.0, "accuracy": 0.0, "second": 0.0}
        count = 0
        for x, labels in validation:
            logits = model(x).detach()
            sums["loss"] += float(F.cross_entropy(logits, labels, reduction="sum"))
            for name, metric in METRICS.items():
                sums[name] += metric(logits, labels)[0]
            count += int((labels != -100).sum())
        return {name: total / count for name, total in sums.items()}

    for _ in range(EPOCHS):
        for x, labels in train:
            loss = F.cross_entropy(model(x), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            around.stepped({name: p.detach() for name, p in model.named_parameters()})
            told.losses.append(float(loss.detach()))
        told.validations.append(validate())
        if around.validated(told.validations[-1]["loss"], {n: p.detach() for n, p in model.named_parameters()}):
            break
    model.load_state_dict(around.best)
    told.best = validate()
    model.load_state_dict(around.average)
    told.average = validate()
    return told


def _compiled(layout: Mapping[str, Any]) -> quintnet.CompiledProgram:
    axes = {name: size for name, size in layout.items() if name in ("dp", "tp", "pp")}
    options = {name: x for name, x in layout.items() if name not in axes}
    return quintnet.compile(Net().double(), quintnet.Mesh(**axes), TRAIN[:8], loss_fn=F.cross_entropy, **options)


def _validated(program: quintnet.CompiledProgram) -> dict[str, float]:
    """By hand, with what a program offers."""
    _, validation = _loaders()
    sums = dict.fromkeys(METRICS, 0.0)
    count = 0.0
    for x, labels in validation:
        logits = program(x)
        for name, metric in METRICS.items():
            found, counted = metric(logits, labels)
            sums[name] += found
        count += counted
    loss = float(program.evaluate_together(validation))
    return {"loss": loss, **{name: total / count for name, total in sums.items()}}


def _own_loop(layout: Mapping[str, Any]) -> Told:
    program, told, around = _compiled(layout), Told(), Around()
    optimizer = torch.optim.AdamW(program.parameters(), lr=0.1)
    train, _ = _loaders()
    for _ in range(EPOCHS):
        for batch in train:
            told.losses.append(float(program.step(batch)))
            optimizer.step()
            optimizer.zero_grad()
            around.stepped(program.state_dict())
        told.validations.append(_validated(program))
        if around.validated(told.validations[-1]["loss"], program.state_dict()):
            break
    program.load_state_dict(around.best)
    told.best = _validated(program)
    program.load_state_dict(around.average)
    told.average = _validated(program)
    return told


class Keeper(quintnet.Callback):
    def __init__(self) -> None:
        self.around = Around()

    def on_step(self, trainer: quintnet.Trainer, loss: Tensor) -> None:
        self.around.stepped(trainer.program.state_dict())

    def on_validation(self, trainer: quintnet.Trainer, numbers: Mapping[str, float]) -> None:
        self.around.validated(numbers["loss"], trainer.program.state_dict())


def _trainer(layout: Mapping[str, Any]) -> Told:
    program, keeper = _compiled(layout), Keeper()
    trainer = quintnet.Trainer(
        program, torch.optim.AdamW(program.parameters(), lr=0.1), *_loaders(), epochs=EPOCHS, patience=PATIENCE,
        metrics=METRICS, callbacks=[keeper], console=False,
    )  # fmt: skip
    history = trainer.fit()
    told = Told(history.losses, [dict(numbers) for _, numbers in history.validations])
    program.load_state_dict(keeper.around.best)
    told.best = trainer.validate()
    program.load_state_dict(keeper.around.average)
    told.average = trainer.validate()
    return told


LOOPS = {"a loop of one's own": _own_loop, "quintnet.Trainer": _trainer}


def _equal(found: Told, wanted: Told) -> None:
    assert found.losses == pytest.approx(wanted.losses, rel=1e-9)
    assert len(found.validations) == len(wanted.validations) < EPOCHS
    pairs = zip(
        [*found.validations, found.best, found.average], [*wanted.validations, wanted.best, wanted.average], strict=True
    )
    for numbers, known in pairs:
        assert numbers == pytest.approx(known, rel=1e-9)


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("loop", LOOPS)
def test_loops(loop: str, layout: dict[str, Any]) -> None:
    _equal(LOOPS[loop](layout), _plain())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loop", "layout"), [("quintnet.Trainer", {"dp": 2, "zero": 3}), ("a loop of one's own", {"pp": 2})]
)
def test_loops_in_processes(loop: str, layout: dict[str, Any]) -> None:
    wanted = _plain()
    for found in quintnet.launch(LOOPS[loop], 2, args=(layout,), timeout=300):
        _equal(found, wanted)
