"""Turns of threads, and what a process finishes at its end."""

from __future__ import annotations

import resource
import threading
from pathlib import Path

import pytest
from torch import nn

from quintnet_compiler.checkpoint import pieces
from quintnet_compiler.checkpoint.background import Saving
from quintnet_compiler.checkpoint.lock import FolderLocks
from quintnet_compiler.checkpoint.stores.disk_folder import DiskFolder
from quintnet_compiler.checkpoint.training_state import Destination
from quintnet_compiler.core.errors import CheckpointError, CheckpointWarning, RunError
from quintnet_compiler.runtime.launch import attempt, inside_launcher
from quintnet_compiler.runtime.threads import at_exit, room
from quintnet_compiler.runtime.threads.turns import LocalTurns, WorldTurn, all_turns, turn_of


def test_who_shares_a_part_shares_a_turn() -> None:
    part, alone = nn.Linear(2, 2), nn.Linear(2, 2)
    one, other = nn.Sequential(part, nn.ReLU()), nn.Sequential(part, nn.ReLU())
    assert turn_of([one]) is turn_of([other]) is turn_of([part]) is not turn_of([alone])
    both = turn_of([nn.Sequential(one, alone)])
    assert isinstance(both, LocalTurns) and set(both.turns) == {turn_of([one]), turn_of([alone])}
    joined = all_turns(turn_of([alone]), turn_of([one]))
    assert isinstance(joined, LocalTurns) and joined.turns == both.turns
    free = nn.ReLU()  # without a tensor, each place of it is its own
    assert turn_of([nn.Sequential(free)]) is not turn_of([nn.Sequential(free)])


def test_one_thread_of_a_circle_is_told_and_the_others_go_on() -> None:
    """Threads acquire the locks of the next ones, time and again: each circle has one error, and all go on."""
    number, rounds = 4, 200
    turns = [turn_of([nn.Linear(1, 1)]) for _ in range(number)]
    start, told = threading.Barrier(number), list[str]()

    def hold(i: int) -> None:
        for _ in range(rounds):
            start.wait(60)
            with turns[i], turns[i]:
                start.wait(60)
                try:
                    with turns[(i + 1) % number]:
                        pass
                except RunError as error:
                    told.append(str(error))

    threads = [threading.Thread(target=hold, args=(i,), name=f"holder-{i}", daemon=True) for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert len(told) == rounds
    assert all(f"'holder-{i}'" in text for i in range(number) for text in told)


def test_threads_that_hold_locks_in_one_order_are_never_told() -> None:
    first, last, errors = turn_of([nn.Linear(1, 1)]), turn_of([nn.Linear(1, 1)]), list[BaseException]()
    count = [0]

    def enter() -> None:
        try:
            for _ in range(3000):
                with first, last, first:
                    count[0] += 1
                with last:
                    count[0] += 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=enter, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == [] and count == [3 * 6000]


def test_the_turn_of_a_world_names_who_has_it() -> None:
    turn, inside, end = WorldTurn(), threading.Event(), threading.Event()

    def hold() -> None:
        with turn, turn:
            inside.set()
            end.wait(60)

    thread = threading.Thread(target=hold, name="holder")
    thread.start()
    assert inside.wait(60)
    with pytest.raises(RunError, match="while thread 'holder' does"):
        turn.__enter__()
    end.set()
    thread.join(60)
    with turn:
        pass


class _Work:
    def __init__(self, name: str, error: CheckpointError | None = None, *, over: bool = False) -> None:
        self.name, self.error, self.over, self.waited = name, error, over, list[float]()

    def finish(self, seconds: float) -> None:
        self.waited.append(seconds)
        if self.error is not None:
            raise self.error


def test_all_is_finished_and_the_first_error_told() -> None:
    error = CheckpointError("QN603", "first")
    works = [_Work("over", over=True), _Work("fails", error), _Work("last", CheckpointError("QN603", "second"))]
    for work in works:
        at_exit.finish_at_exit(work)
    with pytest.raises(CheckpointError) as caught:
        at_exit.finish_all(5.0)
    assert caught.value is error and [len(work.waited) for work in works] == [0, 1, 1]
    at_exit.finish_all(5.0)
    at_exit.finish_at_exit(works[1])
    with pytest.warns(CheckpointWarning, match="first"):
        at_exit.finish_or_warn(5.0)


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("launched", [True, False])
def test_the_end_of_a_job_says_that_its_save_failed(launched: bool, raises: bool) -> None:
    """Beside what the job raises, as a warning; else as the job's error. The end waits as long as it may."""
    work = _Work("fails", CheckpointError("QN603", "the disk is full"))

    def job() -> None:
        at_exit.finish_at_exit(work)
        if raises:
            raise ValueError("of the job")

    def end() -> str:
        if launched:
            return str(attempt._answer(attempt.Job(job, 1, 5.0), 0))
        with inside_launcher.finished_saves(5.0):
            job()
        return ""

    if launched and raises:
        with pytest.warns(CheckpointWarning, match="the disk is full"):
            assert "of the job" in end()
    elif raises:
        with pytest.warns(CheckpointWarning, match="the disk is full"), pytest.raises(ValueError, match="of the job"):
            end()
    else:
        with pytest.raises(CheckpointError, match="the disk is full"):
            end()
    assert len(work.waited) == 1 and 0 < work.waited[0] <= 5


def test_a_save_is_over_when_its_thread_has_ended() -> None:
    """A thread that still frees tensors while the interpreter ends would abort the process."""
    lingers = threading.Event()

    def write(saving: Saving) -> None:
        saving.set_result(Path("step"))
        lingers.wait(60)

    saving = Saving(Destination(DiskFolder(Path("folder")), 1, None, FolderLocks()), write)
    saving.thread.start()
    assert saving.result(60) == Path("step") and not saving.over
    with pytest.raises(CheckpointError, match="QN603"):
        saving.finish(0.01)
    lingers.set()
    saving.finish(60)
    assert saving.over


def test_without_room_no_thread_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that dies before it runs is waited for without end: whoever wanted it works alone."""

    def limited(kind: int) -> tuple[int, int]:
        return (2**20, 2**20) if kind == resource.RLIMIT_AS else (resource.RLIM_INFINITY,) * 2

    monkeypatch.setattr(resource, "getrlimit", limited)
    monkeypatch.setattr(threading.Thread, "start", lambda thread: pytest.fail("a thread was started"))
    assert not room.has_room(1)
    with pytest.raises(RuntimeError, match="no room"):
        room.start_thread(threading.Thread())
    workers = list[int]()
    pieces.shared(lambda share: workers.append(threading.get_ident()), range(20))
    assert set(workers) == {threading.get_ident()} and len(workers) > 1
    monkeypatch.undo()
    assert room.has_room(1)
