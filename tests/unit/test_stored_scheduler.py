"""What a checkpoint cannot hold of a scheduler, and which scheduler a state is refused for."""

from __future__ import annotations

import functools
import json
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

from quintnet_compiler.core.errors import CheckpointError
from quintnet_compiler.training.resume.stored_scheduler import StoredScheduler


def _optimizer(groups: int = 1) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [nn.Parameter(torch.ones(2))]} for _ in range(groups)], lr=0.1)


class Holder(schedulers.LRScheduler):
    """Has a value in its state."""

    def __init__(self, optimizer: torch.optim.Optimizer, value: Any) -> None:
        self.value = value
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        return self.base_lrs


class AList(list[int]):
    """A list with attributes."""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (threading.Lock(), "value is a lock"),
        ([1, {"a": AList()}], "value.1.a is a AList"),
        ({1: {"b": nn.Linear(1, 1)}}, "value.1.b is a Linear"),
        (types.SimpleNamespace(a=(iter([]),)), "value: a.0 is a list_iterator"),
        ({frozenset([print]): 1}, "a key of the scheduler's state: value.*builtin_function"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_named_at_once(value: Any, text: str) -> None:
    optimizer = _optimizer()
    with pytest.raises(CheckpointError, match=text) as raised:
        StoredScheduler(Holder(optimizer, value), optimizer)
    assert raised.value.code == "QN603"


def test_a_state_that_cannot_be_read_or_that_holds_itself() -> None:
    optimizer = _optimizer()
    with pytest.raises(CheckpointError, match=r"LambdaLR.state_dict\(\) fails: AttributeError"):
        StoredScheduler(schedulers.LambdaLR(optimizer, abs), optimizer)
    rows: list[Any] = []
    rows.append(rows)
    with pytest.raises(CheckpointError, match="holds itself"):
        StoredScheduler(Holder(optimizer, rows), optimizer)


def _first(x: float) -> float:
    return x


def _second(x: float) -> float:
    return 2 * x


def test_a_function_that_took_the_place_of_another_is_refused() -> None:
    optimizer = _optimizer()
    scheduler = Holder(optimizer, functools.partial(_first, 1))
    stored = StoredScheduler(scheduler, optimizer)
    stored.to_json()
    scheduler.value = functools.partial(_first, 2)
    with pytest.raises(CheckpointError, match="value is a partial"):
        stored.to_json()


def _step(o: torch.optim.Optimizer) -> Any:
    return schedulers.StepLR(o, 2)


@pytest.mark.parametrize(
    ("saved", "here", "groups", "text"),
    [
        (_step, lambda o: schedulers.ExponentialLR(o, 0.5), 1, "is a ExponentialLR, .* state of a StepLR"),
        (_step, _step, 2, "has 2 groups, and had 1"),
        (
            lambda o: schedulers.ChainedScheduler([_step(o), schedulers.ConstantLR(o)]),
            lambda o: schedulers.ChainedScheduler([_step(o)]),
            1,
            r"ChainedScheduler\(StepLR\), .* ChainedScheduler\(StepLR, ConstantLR\)",
        ),
        (lambda o: Holder(o, _first), lambda o: Holder(o, _second), 1, "_first as value, and here is .*_second"),
        (lambda o: Holder(o, _first), lambda o: Holder(o, 1), 1, "_first as value, and here is nothing"),
        (_step, lambda o: schedulers.StepLR(o, 5), 1, ""),
        (lambda o: Holder(o, 1.0), lambda o: Holder(o, "text"), 1, ""),
    ],
)
def test_a_state_of_another_scheduler_is_refused(
    saved: Callable[[Any], Any], here: Callable[[Any], Any], groups: int, text: str
) -> None:
    first, second = _optimizer(), _optimizer(groups)
    note = json.loads(json.dumps(StoredScheduler(saved(first), first).to_json()))
    stored = StoredScheduler(here(second), second)
    if not text:
        stored.require(note, "it")
        return stored.set_state(note)
    with pytest.raises(CheckpointError, match=text) as raised:
        stored.require(note, "it")
    assert raised.value.code == "QN602"


def test_the_state_of_an_earlier_version_is_read() -> None:
    optimizer = _optimizer()
    scheduler = schedulers.StepLR(optimizer, 2)
    stored = StoredScheduler(scheduler, optimizer)
    state = {**scheduler.state_dict(), "last_epoch": 7, "base_lrs": [0.5]}
    stored.require(state, "it")
    stored.set_state(state)
    assert (scheduler.last_epoch, scheduler.base_lrs) == (7, [0.5])
