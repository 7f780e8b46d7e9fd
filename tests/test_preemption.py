"""Runs that a scheduler ends and starts again: they end as if nothing had happened, bit by bit."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.util import register_after_fork
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import quintnet
from quintnet_compiler.runtime.launch.preemption import handling

from .preempted_run import EPOCHS, ROWS, train
from .test_launchers import TOLD, _clean

STEPS = EPOCHS * ROWS // 8
Send = Callable[[int], None]


def _agreed(folder: Path, axes: dict[str, int], check_finite: bool) -> list[int]:
    """One rank gets a signal in its third step, and every rank leaves after the same one."""
    torch.manual_seed(0)
    batch = torch.randn(8, 6), torch.randn(8, 6)
    model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
    program = quintnet.compile(
        model, quintnet.Mesh(**axes), batch, loss_fn=F.mse_loss, check="off", check_finite=check_finite
    )
    optimizer = torch.optim.SGD(program.parameters(), lr=0.1)
    rank, step = dist.get_rank(), 0

    def save() -> None:
        (folder / f"left{rank}").write_text(str(step))
        program.save(folder, step=step, optimizer=optimizer)

    before = signal.getsignal(signal.SIGUSR1)
    try:
        with program.on_preempt(save) as end_of_step:
            for step in range(1, 100):
                if step == 3 and rank == 1:
                    os.kill(os.getpid(), signal.SIGUSR1)
                program.step(batch)
                optimizer.step()
                optimizer.zero_grad()
                end_of_step()
    finally:
        assert signal.getsignal(signal.SIGUSR1) is before
    return []


@pytest.mark.parametrize(
    ("axes", "check_finite"),
    [({"pp": 2}, True), pytest.param({"dp": 2}, False, marks=pytest.mark.slow)],
)
def test_all_ranks_leave_after_the_same_step(axes: dict[str, int], check_finite: bool, tmp_path: Path) -> None:
    with pytest.raises(quintnet.Preempted) as caught:
        quintnet.launch(_agreed, 2, (tmp_path, axes, check_finite), restarts=1)
    assert caught.value.code == quintnet.REQUEUE_EXIT_CODE
    assert [(tmp_path / f"left{rank}").read_text() for rank in range(2)] == ["3", "3"]
    assert [one.name for one in tmp_path.glob("step-*")] == ["step-00000003"]


def _launched(folder: Path, pause: float, after: float | None) -> str | None:
    """``train`` on two ranks; this process gets SIGTERM ``after`` seconds of training. None if that ended it."""
    (folder / "going").unlink(missing_ok=True)

    def end() -> None:
        while not (folder / "going").exists():
            time.sleep(0.01)
        time.sleep(after or 0)
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # launch still runs
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=end)
    if after is not None:
        thread.start()
    try:
        found: str = quintnet.launch(train, 2, (str(folder), pause))[0]
        return found
    except quintnet.Preempted as error:
        assert error.code == quintnet.REQUEUE_EXIT_CODE
        return None
    finally:
        if after is not None:
            thread.join()


@pytest.mark.slow
def test_runs_that_are_ended_and_queued_again_are_equal_bit_by_bit(tmp_path: Path) -> None:
    """Two of those of the sweep below, without interpreters of their own. The second one ends after an epoch's last
    step or so, before what is done at the epoch's end."""
    dice, whole = random.Random(7), tmp_path / "whole"
    whole.mkdir()
    expected = _launched(whole, 0.0, None)
    for number, limit in enumerate((0.2, 0.6)):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert _launched(folder, 0.01, dice.uniform(0.5, 1.0) * limit) is None
        assert len([*(folder / "checkpoints").glob("step-*")]) > 0
        assert _launched(folder, 0.0, None) == expected


def _signalled_by_another(process: int, number: int) -> None:
    subprocess.run(["kill", f"-{number}", str(process)], check=True)


def _wait_for_a_signal(ready: Connection) -> None:
    ready.send(
        signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    time.sleep(20)


def test_a_child_of_multiprocessing_hears_its_parent_alone() -> None:
    context, came = multiprocessing.get_context("fork"), list[int]()
    with handling([signal.SIGTERM], came.append), handling([signal.SIGUSR1, signal.SIGTERM], came.append):
        ours, theirs = context.Pipe()
        child = context.Process(target=_wait_for_a_signal, args=(theirs,), daemon=True)
        child.start()
        assert child.pid and ours.poll(10) and ours.recv()
        for number in (signal.SIGTERM, signal.SIGUSR1):
            _signalled_by_another(child.pid, number)
        child.join(0.2)
        assert child.is_alive()
        child.terminate()
        child.join(10)
    assert child.exitcode == -signal.SIGTERM and not came
    later = context.Process(target=_wait_for_a_signal, args=(theirs,), daemon=True)
    later.start()
    assert later.pid and ours.poll(10) and ours.recv()
    _signalled_by_another(later.pid, signal.SIGUSR1)
    later.join(10)
    assert later.exitcode == -signal.SIGUSR1


class _Early:
    """Registered before a handler is, so that its turn in a child comes first."""

    def signal_child(self) -> None:
        _signalled_by_another(os.getpid(), signal.SIGUSR1)


def test_a_signal_that_comes_while_a_child_is_forked_waits_until_the_child_knows_whom_to_hear() -> None:
    context, early, came = multiprocessing.get_context("fork"), _Early(), list[int]()
    register_after_fork(early, _Early.signal_child)
    with handling([signal.SIGUSR1], came.append):
        child = context.Process(target=time.sleep, args=(0.2,))
        child.start()
        child.join(20)
        forked = os.fork()
        if forked == 0:
            os._exit(0 if signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, []) else 1)
        assert os.waitpid(forked, 0)[1] == 0  # one that is not of multiprocessing has nothing blocked
    assert child.exitcode == 0 and not came
    assert signal.SIGUSR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


class _Numbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.01)
        return torch.tensor(index)


def test_workers_of_a_loader_go_on_after_a_signal_to_their_group() -> None:
    came: list[int] = []
    with handling([signal.SIGUSR1, signal.SIGTERM], came.append):
        loader = iter(DataLoader(_Numbers(), batch_size=1, num_workers=2, multiprocessing_context="fork"))
        rows = [int(next(loader))]
        for worker in multiprocessing.active_children():
            for number in (signal.SIGTERM, signal.SIGUSR1):
                _signalled_by_another(worker.pid or 0, number)
        rows += [int(row) for row in loader]
    assert rows == list(range(12)) and not came and not multiprocessing.active_children()


# -- with interpreters of their own, as schedulers start them


def _script(folder: Path, pause: float, workers: int = 0) -> list[str]:
    return [sys.executable, "-m", "tests.preempted_run", str(folder), str(pause), "2", str(workers)]


def _scheduled(
    folder: Path, dice: random.Random, ends: int, start: Callable[[], list[subprocess.Popen[str]]], send: Send
) -> tuple[str, int]:
    """Start processes, end them up to ``ends`` times, queue them again: the result, and how often they were ended.
    ``send`` is given the number of one of them. Signals that come when ``fit`` is over end them as they always do."""
    ended = 0
    while True:
        for name in ("going", "fitted"):
            (folder / name).unlink(missing_ok=True)
        processes = start()
        if ended < ends:
            while not (folder / "going").exists() and processes[0].poll() is None:
                time.sleep(0.01)
            time.sleep(dice.uniform(0, 1.5))
            for process in processes:
                if process.poll() is None:
                    send(process.pid)
        said = [process.communicate(timeout=300)[1] for process in processes]
        codes = {process.returncode for process in processes}
        if codes == {0}:
            return (folder / "digest").read_text(), ended
        if (folder / "fitted").exists() and codes <= {0, -signal.SIGTERM, -signal.SIGUSR1}:
            continue
        assert codes == {quintnet.REQUEUE_EXIT_CODE}, (codes, "\n".join(said))
        ended += 1


def _started(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    # a session of its own: what is sent to the group does not reach this process
    return subprocess.Popen(
        command,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=Path(__file__).parents[1],
    )


def _ranks(folder: Path, workers: int = 0) -> Callable[[], list[subprocess.Popen[str]]]:
    """As srun starts them: each rank is a process that it signals by itself."""
    return lambda: [_started(_script(folder, 0.01, workers), {**_clean(), **TOLD["srun"](rank)}) for rank in range(2)]


def _launch(folder: Path, workers: int = 0) -> Callable[[], list[subprocess.Popen[str]]]:
    return lambda: [_started(_script(folder, 0.01, workers), _clean())]


def _term(process: int) -> None:
    os.kill(process, signal.SIGTERM)


# Workers of a DataLoader are in the group of their rank.
WAYS = {
    "launch": (_launch, _term, 0),
    "launch, the whole group, with workers": (_launch, lambda process: os.killpg(process, signal.SIGTERM), 2),
    "srun, each rank": (_ranks, _term, 0),
    "srun, each rank's group, with workers": (_ranks, lambda process: os.killpg(process, signal.SIGUSR1), 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_sweep_of_runs_under_a_scheduler(way: str, tmp_path: Path) -> None:
    """Five of each way: 20 runs."""
    make, send, workers = WAYS[way]
    whole = tmp_path / "whole"
    whole.mkdir()
    expected, _ = _scheduled(whole, random.Random(0), 0, make(whole, workers), send)
    endings = []
    for number in range(5):
        folder = tmp_path / str(number)
        folder.mkdir()
        found, ended = _scheduled(folder, random.Random(number), 2, make(folder, workers), send)
        assert found == expected, number
        endings.append(ended)
    assert sum(endings) >= 5, endings
