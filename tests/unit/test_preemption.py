"""Signals that ask a run to end: noted, agreed upon, passed on, and handled as before afterwards."""

from __future__ import annotations

import math
import os
import pickle
import signal
import threading
import time

import pytest
import torch

import quintnet
from quintnet_compiler.core.errors import RunError
from quintnet_compiler.runtime.launch.faults import gone
from quintnet_compiler.runtime.launch.forwarding import forwarding
from quintnet_compiler.runtime.launch.preemption import REQUEUE_EXIT_CODE, Preempted, Preemption, handling

USUAL = signal.SIG_DFL


def _child() -> int:
    """A forked process that waits for a signal; it is ready when this returns."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        os.write(theirs, b" ")
        time.sleep(20)
        os._exit(0)
    os.read(ours, 1)
    os.close(ours)
    os.close(theirs)
    return child


def test_the_exit_code_is_that_of_an_error_that_may_be_retried() -> None:
    assert REQUEUE_EXIT_CODE == 128 + signal.SIGUSR1 and issubclass(Preempted, SystemExit)
    assert pickle.loads(pickle.dumps(Preempted())).code == REQUEUE_EXIT_CODE


def test_signals_are_noted_and_handled_as_before_afterwards() -> None:
    came: list[int] = []
    with handling([signal.SIGUSR1, signal.SIGUSR1], came.append):
        with handling([signal.SIGUSR1], lambda number: came.append(-number)):
            os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
    assert came == [-signal.SIGUSR1, signal.SIGUSR1] and signal.getsignal(signal.SIGUSR1) is USUAL


def test_signals_that_cannot_be_handled_are_refused_and_nothing_stays_changed() -> None:
    with pytest.raises(RunError, match=r"QN306.*\n.*SIGKILL"), handling([signal.SIGUSR1, signal.SIGKILL], print):
        pass
    assert signal.getsignal(signal.SIGUSR1) is USUAL
    found: list[str] = []

    def elsewhere() -> None:
        try:
            with handling([signal.SIGUSR1], print):
                pass
        except RunError as error:
            found.append(str(error))
        with handling([], print), forwarding(1.0) as signals:
            assert signals.first is None

    thread = threading.Thread(target=elsewhere, name="another")
    thread.start()
    thread.join()
    assert "SIGUSR1 cannot be handled in thread another" in found[0]


def test_a_forked_child_handles_signals_as_before() -> None:
    came: list[int] = []
    with handling([signal.SIGUSR1], came.append):
        child = _child()
        os.kill(child, signal.SIGUSR1)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGUSR1 and not came and gone(child)


def test_ranks_leave_once_the_sum_says_that_one_was_asked() -> None:
    one, saved = Preemption(), []
    one.ask(15)
    for count in (0.0, math.nan):  # asked after the sum was made; gradients that are not finite
        one.hear(count)
        one.leave_if_agreed(lambda: saved.append(1))
    one.hear(2.0)
    with pytest.raises(Preempted):
        one.leave_if_agreed(lambda: saved.append(1))
    assert saved == [1]


def test_a_step_counts_who_was_asked_beside_its_loss() -> None:
    """All ranks in this process: four of them add 1 each. The loss is that of a step without it."""
    batch = torch.randn(8, 4), torch.randn(8, 4)
    program = quintnet.compile(
        torch.nn.Linear(4, 4), quintnet.Mesh(dp=2, tp=2), batch, loss_fn=torch.nn.functional.mse_loss, check="off"
    )
    usual, saved = program.step(batch), []
    with program.on_preempt(lambda: saved.append(1)) as end_of_step:
        assert torch.equal(program.step(batch), usual)
        end_of_step()
        os.kill(os.getpid(), signal.SIGTERM)
        end_of_step()  # no step was made since
        assert torch.equal(program.step(batch), usual) and not saved
        with pytest.raises(Preempted):
            end_of_step()
    assert saved == [1] and signal.getsignal(signal.SIGTERM) is USUAL


def test_what_comes_is_passed_on_and_the_time_told(capfd: pytest.CaptureFixture[str]) -> None:
    children = [_child()]
    with forwarding(0.0) as signals:
        signals.pass_on(children)
        assert signals.first is None and not signals.late
        os.kill(os.getpid(), signal.SIGTERM)
        signals.pass_on(children)
    _, status = os.waitpid(children[0], 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM and signals.late
    assert "SIGTERM is passed on to 1 rank: 0 s to save and end" in capfd.readouterr().err
    own = signal.signal(signal.SIGUSR1, lambda *_: None)
    with forwarding(1.0):  # who handles a signal keeps it
        os.kill(os.getpid(), signal.SIGUSR1)
        assert not signals.came
    signal.signal(signal.SIGUSR1, own)
