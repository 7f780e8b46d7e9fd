"""Random numbers of the process: forward may draw none; other threads may, whenever they like."""

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
