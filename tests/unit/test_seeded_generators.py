"""Forward may not write to the state of random number generators; libraries that restore it may."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.random import fork_rng, manual_seed
from torch.utils.checkpoint import checkpoint

import quintnet
from quintnet_compiler.guards.seeded_generators import GeneratorWrites

X = torch.randn(8, 6)
generator = torch.Generator()


class Noisy(nn.Module):
    def __init__(self, factor: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(6, 4), factor

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return (y * self.factor(y)).mean()


def forks(y: Tensor) -> Tensor:
    with fork_rng(devices=[]):
        return torch.randn_like(y)


def restores(y: Tensor) -> Tensor:
    state = torch.get_rng_state()
    noise = torch.rand_like(y)
    torch.set_rng_state(state)
    return noise


def restores_pythons(y: Tensor) -> float:
    state = random.getstate()
    number = random.random()
    random.setstate(state)
    return number


def catches(y: Tensor) -> Tensor:
    try:
        manual_seed(0)
    except Exception:
        return y
    return torch.rand_like(y)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "torch.random.manual_seed": lambda y: torch.manual_seed(0) and torch.rand_like(y),
    "torch.random.manual_seed;": catches,
    "torch.random.seed": lambda y: torch.seed() and torch.rand_like(y),
    "torch.random.fork_rng": forks,
    "torch.random.set_rng_state": restores,
    "torch.default_generator.manual_seed": lambda y: torch.default_generator.manual_seed(0) and torch.rand_like(y),
    "torch.cuda.manual_seed": lambda y: torch.cuda.manual_seed(0) or F.dropout(y),
    "torch.cuda.manual_seed_all": lambda y: torch.cuda.manual_seed_all(0) or F.dropout(y),
    "random.seed": lambda y: random.seed(0) or 1.0,
    "random.setstate": restores_pythons,
    "numpy.random.seed": lambda y: numpy.random.seed(0) or float(numpy.random.rand()),
    "the state of 'factor.generator'": lambda y: generator.manual_seed(0) and 1.0,
}


@pytest.mark.parametrize("call", WRITES)
def test_a_forward_that_seeds_is_refused(call: str) -> None:
    model = Noisy(WRITES[call])
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    with pytest.raises(quintnet.CompileError, match="QN110") as raised:
        quintnet.compile(model, quintnet.Mesh(dp=2), (X,), check="off")
    assert call.removesuffix(";").replace("'factor.generator'", "") in str(raised.value)
    assert raised.value.where is not None and ".py:" in raised.value.where.source
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert numpy.random.get_state()[1].tolist() == states[2]


def test_a_loss_that_seeds_is_refused_in_training_and_in_evaluation() -> None:
    def loss_fn(y: Tensor, labels: Tensor) -> Tensor:
        if seeds:
            torch.manual_seed(0)
        return F.mse_loss(F.dropout(y), labels)

    seeds, batch = True, (X, torch.randn(8, 4))
    with pytest.raises(quintnet.CompileError, match=r"calls torch.random.manual_seed(.|\n)*torch.manual_seed\(0\)"):
        quintnet.compile(nn.Linear(6, 4), quintnet.Mesh(dp=2), batch, loss_fn=loss_fn, check="off")
    seeds = False
    program = quintnet.compile(nn.Linear(6, 4), quintnet.Mesh(dp=2), batch, loss_fn=loss_fn, check="off")
    seeds = True
    with pytest.raises(quintnet.CompileError, match="manual_seed"):
        program.evaluate(batch)


def test_what_libraries_save_and_restore_is_followed() -> None:
    def forks_in_vain(y: Tensor) -> float:
        with fork_rng(devices=[]):
            return 1.0

    def checkpointed(y: Tensor) -> Any:
        return checkpoint(F.dropout, y, use_reentrant=False)

    for factor in (forks_in_vain, checkpointed):
        assert quintnet.compile(Noisy(factor), quintnet.Mesh(dp=2), (X,)).verify().ok


def test_a_generator_of_forwards_own_is_refused_with_its_line() -> None:
    noise = lambda y: torch.randn(4, generator=generator)  # noqa: E731
    with pytest.raises(quintnet.CompileError, match=r"QN105(.|\n)*generator=generator") as raised:
        quintnet.compile(Noisy(noise), quintnet.Mesh(dp=2), (X,), check="off")
    assert "of its own" in str(raised.value)


def test_another_threads_writes_are_made() -> None:
    writes, before = GeneratorWrites(lambda frame: None, lambda frame: ""), torch.get_rng_state()
    try:
        with writes.recorded():
            thread = threading.Thread(target=lambda: torch.manual_seed(17))
            thread.start()
            thread.join()
        writes.refuse_first()
        assert torch.initial_seed() == 17 and not writes.calls
    finally:
        torch.set_rng_state(before)
