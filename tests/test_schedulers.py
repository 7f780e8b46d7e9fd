"""Schedulers in a Trainer that is interrupted inside an epoch, beside the same loop in plain PyTorch: every rate and
loss, and the scheduler's state with its types."""

from __future__ import annotations

import enum
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR
from torch.utils.data import DataLoader, TensorDataset

import quintnet

EPOCHS, BATCHES = 3, 4
Make = Callable[[torch.optim.Optimizer], Any]


class Decay:
    """A callable object that counts its calls in several types."""

    def __init__(self) -> None:
        self.calls: Counter[int] = Counter()
        self.last: deque[float] = deque(maxlen=2)

    def __call__(self, step: int) -> float:
        self.calls[step] += 1
        self.last.append(1 / (1 + len(self.calls)))
        return sum(self.last) / len(self.last)


class Phase(enum.Enum):
    WARM = 0.5
    COOL = 0.25


class Seen(NamedTuple):
    step: int
    rate: np.float64


@dataclass
class Policy:
    phase: Phase = Phase.WARM
    history: list[Seen] = field(default_factory=list)
    other: Any = None


class Written(LRScheduler):
    """A scheduler with state of many types, among them lists that grow, and attributes that it gets later."""

    best: Any = None

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.policy = Policy(other=optimizer)
        self.rates: tuple[float, ...] = ()
        self.table: dict[Any, Any] = {(0, "a"): {1, 2}, None: b"x", Phase.COOL: 1j, 2: torch.ones(2), "2": range(3)}
        self.counts: Any = defaultdict(list)
        self.order: Any = OrderedDict()
        self.shrink = math.sqrt
        self.array = np.zeros(2, np.float32)
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        step = self.last_epoch
        if step == 2:
            self.policy.phase, self.later = Phase.COOL, {"step": step}
        self.policy.history.append(Seen(step, np.float64(step)))
        self.best = torch.tensor(float(step))
        self.counts[step % 2].append(step)
        self.order[step] = self.array = self.array + np.float32(1)
        factor = self.policy.phase.value * self.shrink(1 + len(self.policy.history) + len(self.counts[0]))
        rates = [rate * factor + float(self.array[0]) / 100 for rate in self.base_lrs]
        self.rates = (*self.rates, *rates)
        return rates


class Warmup(LRScheduler):
    """The pattern of gradual warm-up: an attribute is the scheduler that follows."""

    def __init__(self, optimizer: torch.optim.Optimizer, after: LRScheduler) -> None:
        self.after = after
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        if self.last_epoch > 3:
            self.after.step()
            return self.after.get_last_lr()
        return [rate * (1 + self.last_epoch) / 5 for rate in self.base_lrs]


class OwnWords:
    """No subclass of torch's: only ``step`` and a state of its own."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.losses = optimizer, [1.0]

    def step(self) -> None:
        self.losses.append(self.losses[-1] * 0.9)
        for group in self.optimizer.param_groups:
            group["lr"] = 0.1 * self.losses[-1]

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "bound": math.inf, "none": math.nan}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = list(state["losses"])


def _cosine(x: float) -> float:
    return (1 + math.cos(x)) / 2


def _sequence(o: torch.optim.Optimizer) -> LRScheduler:
    parts = [
        schedulers.LinearLR(o, 0.2, total_iters=2),
        schedulers.MultiStepLR(o, [1, 3]),
        schedulers.CosineAnnealingLR(o, 4),
    ]
    return schedulers.SequentialLR(o, parts, [3, 6])


CASES: dict[str, Make] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, [lambda step: 0.9**step, lambda step: 1 / (1 + step)]),
    "LambdaLR of objects": lambda o: schedulers.LambdaLR(o, [Decay(), lambda step: 1.0]),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, Decay()),
    "StepLR": lambda o: schedulers.StepLR(o, 3),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 5, 5, 8]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, total_iters=6),
    "LinearLR": lambda o: schedulers.LinearLR(o, total_iters=7),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 10, 2.0),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3, 2),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 3, mode="triangular2"),
    "CyclicLR of a function": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 3, scale_fn=_cosine),
    "CyclicLR of an object": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, 3, scale_fn=Decay()),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, [0.1, 0.2], 12, three_phase=True),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "SequentialLR": _sequence,
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.MultiStepLR(o, [3, 6]), schedulers.LambdaLR(o, Decay()), schedulers.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: SWALR(o, 0.02, 6),
    "SWALR, linear": lambda o: SWALR(o, [0.02, 0.03], 6, "linear"),
    "constant_with_warmup": lambda o: transformers.get_constant_schedule_with_warmup(o, 5),
    "linear_with_warmup": lambda o: transformers.get_linear_schedule_with_warmup(o, 5, 12),
    "cosine_with_warmup": lambda o: transformers.get_cosine_schedule_with_warmup(o, 5, 12),
    "cosine_with_hard_restarts": lambda o: transformers.get_cosine_with_hard_restarts_schedule_with_warmup(o, 2, 12, 3),
    "polynomial_decay": lambda o: transformers.get_polynomial_decay_schedule_with_warmup(o, 2, 12),
    "inverse_sqrt": lambda o: transformers.get_inverse_sqrt_schedule(o, 3),
    "wsd": lambda o: transformers.get_wsd_schedule(o, 2, 4, num_stable_steps=4),
    "written": Written,
    "gradual warm-up": lambda o: Warmup(o, schedulers.MultiStepLR(o, [2, 4])),
    "own words": OwnWords,
}  # fmt: skip


def _rows(seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(*(torch.randn(4 * BATCHES, n, generator=generator, dtype=torch.float64) for n in (3, 2)))


TRAIN, VALIDATION = _rows(0), _rows(1)


def _optimizer(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    weight, bias = parameters
    return torch.optim.SGD([{"params": [weight]}, {"params": [bias], "lr": 0.05}], lr=0.1, momentum=0.9)


def _model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2).double()


@dataclass
class Told(quintnet.Callback):
    """The rates before, and the losses of steps."""

    optimizer: torch.optim.Optimizer
    rates: list[Any] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def on_step(self, trainer: Any, loss: torch.Tensor) -> None:
        self.losses.append(float(loss))
        self.rates.append([(group["lr"], group["momentum"]) for group in self.optimizer.param_groups])


def _plain(make: Make) -> tuple[Told, Any]:
    model = _model()
    optimizer = _optimizer(model.parameters())
    scheduler, told = make(optimizer), Told(optimizer)
    for _ in range(EPOCHS):
        for x, y in DataLoader(TRAIN, 4):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            if not isinstance(scheduler, schedulers.ReduceLROnPlateau):
                scheduler.step()
            optimizer.zero_grad()
            told.on_step(None, loss.detach())
        if isinstance(scheduler, schedulers.ReduceLROnPlateau):
            x, y = VALIDATION[:]
            scheduler.step(F.mse_loss(model(x), y).detach())
    return told, scheduler


@pytest.fixture(scope="module")
def program() -> quintnet.CompiledProgram:
    return quintnet.compile(_model(), quintnet.Mesh(dp=2), TRAIN[:4], loss_fn=F.mse_loss)


def _trainer(
    program: quintnet.CompiledProgram, make: Make, folder: Path, steps: int | None
) -> tuple[quintnet.Trainer, Told]:
    program.load_state_dict(_model().state_dict())
    optimizer = _optimizer(program.parameters())
    told = Told(optimizer)
    options: dict[str, Any] = {
        "checkpoint_folder": folder,
        "console": False,
        "log_every": 0,
        "save_every": 6,
        "callbacks": [told],
    }
    loaders = DataLoader(TRAIN, 4), DataLoader(VALIDATION, 8)
    trainer = quintnet.Trainer(
        program, optimizer, *loaders, scheduler=make(optimizer), epochs=EPOCHS, max_steps=steps, **options
    )
    return trainer, told


def _require_same(a: Any, b: Any, where: str = "state") -> None:
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), where
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.tolist()) == (b.dtype, b.tolist()), where
    elif isinstance(a, torch.optim.Optimizer):
        return
    elif isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            _require_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list | tuple | deque):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            _require_same(x, y, f"{where}.{i}")
    elif isinstance(a, Policy | LRScheduler):
        _require_same(vars(a), vars(b), where)
    elif isinstance(a, float):
        assert a == pytest.approx(b, rel=1e-12, nan_ok=True), where
    else:
        assert a == b, where


@pytest.mark.parametrize("case", CASES)
def test_rates_and_losses_are_those_of_the_plain_loop(
    case: str, program: quintnet.CompiledProgram, tmp_path: Path
) -> None:
    expected, plain = _plain(CASES[case])
    first, told = _trainer(program, CASES[case], tmp_path, 6)
    first.fit()
    second, rest = _trainer(program, CASES[case], tmp_path, None)
    second.fit()
    assert told.rates + rest.rates == expected.rates
    assert told.losses + rest.losses == pytest.approx(expected.losses, rel=1e-12)
    _require_same(second.scheduler.state_dict(), plain.state_dict())  # type: ignore[union-attr]
