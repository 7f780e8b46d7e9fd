"""Changes that forward may not make: random numbers of the process, and which parameters are trained."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import quintnet
from quintnet_compiler.capture.changes.refused_changes import changed_by_trace
from quintnet_compiler.capture.watched_trace import MAX_TRIES, WatchedTrace
from quintnet_compiler.guards.python_state import Change


@pytest.fixture
def beside() -> Iterator[None]:
    """Another thread is there."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    yield
    over.set()
    thread.join()


class Traced:
    """Forward of a model, which draws in some of its traces."""

    def __init__(self, draws_in: range) -> None:
        self.model, self.traces, self.draws_in = nn.Linear(2, 2), 0, draws_in

    def run_forward(self) -> int:
        return WatchedTrace({"": self.model}, (), ()).run_forward(self._forward, {}, refuse=True)

    def _forward(self) -> int:
        if self.traces in self.draws_in:
            random.random()
        self.traces += 1
        return self.traces


@pytest.mark.usefixtures("beside")
def test_numbers_that_another_thread_draws_are_not_forwards() -> None:
    for draws in range(MAX_TRIES):
        before = random.getstate()
        assert Traced(range(draws)).run_forward() == draws + 1  # of the trace in which nobody drew
        assert random.getstate() == before


@pytest.mark.usefixtures("beside")
def test_numbers_that_forward_draws_are_refused() -> None:
    with pytest.raises(quintnet.CompileError, match="draws random numbers in Python") as raised:
        Traced(range(100)).run_forward()
    assert raised.value.code == "QN110" and "another thread" in raised.value.fix


def test_alone_the_first_draw_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    with pytest.raises(quintnet.CompileError, match="QN110") as raised:
        Traced(range(1)).run_forward()
    assert "thread" not in raised.value.fix


def test_a_trace_is_not_repeated_for_what_is_no_random_number() -> None:
    error = changed_by_trace([Change("'layer.count'", 0, 1, lambda: True)], "model.py:3: self.count += 1")
    assert error.code == "QN110" and "random" not in str(error) and "model.py:3" in str(error)


@pytest.mark.usefixtures("beside")
def test_a_model_that_draws_is_refused_where_other_threads_are() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * random.random())

    batch = torch.randn(4, 2), torch.randn(4, 2)
    with pytest.raises(quintnet.CompileError, match=r"random.random\(\)"):
        quintnet.compile(Noisy(2, 2), quintnet.Mesh(), batch, loss_fn=nn.functional.mse_loss)


class Adversarial(nn.Module):
    """Trains a generator without the gradients of the discriminator, in one of three ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.generator, self.discriminator, self.way = nn.Linear(2, 2), nn.Linear(2, 1), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fake, discriminator = self.generator(x), self.discriminator
        if self.way == "functional_call":
            detached = {name: p.detach() for name, p in discriminator.named_parameters()}
            return discriminator(x).mean() - torch.func.functional_call(discriminator, detached, (fake,)).mean()
        self._set_flags(False)
        score = discriminator(fake)
        self._set_flags(True)
        return discriminator(x).mean() - score.mean()

    def _set_flags(self, flag: bool) -> None:
        if self.way == "requires_grad_":
            self.discriminator.requires_grad_(flag)
        for parameter in self.discriminator.parameters():
            parameter.requires_grad = flag


@pytest.mark.parametrize("way", ["requires_grad_", "requires_grad"])
def test_a_forward_that_freezes_a_part_is_refused(way: str) -> None:
    model, batch = Adversarial(way), (torch.randn(4, 2),)
    with pytest.raises(quintnet.CompileError, match="sets requires_grad of 'discriminator") as raised:
        quintnet.compile(model, quintnet.Mesh(dp=2), batch, check="off")
    assert raised.value.code == "QN110" and raised.value.where is not None and "parameter" in str(raised.value)
    assert "functional_call(part, {name: p.detach()" in raised.value.fix


def test_a_part_that_is_called_without_its_gradients() -> None:
    torch.manual_seed(0)
    model, batch = Adversarial("functional_call").double(), (torch.randn(4, 2).double(),)
    program = quintnet.compile(model, quintnet.Mesh(dp=2), batch)
    program.step(batch)
    other = Adversarial("requires_grad_").double()
    other.load_state_dict({name: x.detach() for name, x in model.state_dict().items()})
    other(*batch).backward()
    for (name, p), plain in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, plain.grad, rtol=1e-9, atol=1e-9, msg=name)
