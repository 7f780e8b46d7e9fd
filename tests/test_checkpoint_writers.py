"""Who may write into a folder of checkpoints: one process, whose programs take turns; a fork is another process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quintnet
from quintnet_compiler.api.compiled_program import CompiledProgram
from quintnet_compiler.checkpoint import storage
from quintnet_compiler.checkpoint.lock import NAME, FolderLocks

BATCH = (torch.randn(8, 6), torch.randn(8, 3))


def _program() -> CompiledProgram:
    torch.manual_seed(0)
    return quintnet.compile(nn.Linear(6, 3), quintnet.Mesh(dp=1), BATCH, loss_fn=F.mse_loss)


def _there(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name != NAME)


@contextlib.contextmanager
def _held_by_child(take: Callable[[], object]) -> Iterator[int]:
    """Fork a child that takes a folder's lock and holds it while the block runs; yield its process id."""
    (ready, say), (wait, leave) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(leave)
        take()
        os.write(say, b"x")
        os.read(wait, 1)
        os._exit(0)
    os.read(ready, 1)
    try:
        yield child
    finally:
        os.close(leave)
        os.waitpid(child, 0)


def _lock_without_name(folder: Path) -> Callable[[], None]:
    """Return a function that locks the folder's file and does not write who holds it."""
    return lambda: fcntl.flock(os.open(folder / NAME, os.O_RDONLY), fcntl.LOCK_EX)


@pytest.mark.sample(1)
def test_programs_of_a_process_take_turns(place: str) -> None:
    programs, failed = [_program(), _program()], []

    def work(number: int) -> None:
        for i in range(15):
            try:
                programs[number].save(place, step=i * 2 + number, extra={"by": number})
            except BaseException as error:
                failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert failed == []
    newest = programs[0].load(place)
    assert newest.step % 2 == newest.extra["by"]


def test_a_program_saves_after_the_one_that_is_saving(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one's save goes on when the second program asks for its turn."""
    first, second, order = _program(), _program(), list[str]()
    begins, asks = threading.Event(), threading.Event()
    room, publish, turn = storage.place_to_write, storage.commit, FolderLocks.turn

    def place_to_write(folder: Any, step: int) -> Any:
        order.append(f"begins {step}")
        begins.set()
        return room(folder, step)

    def commit(folder: Any, checkpoint: Any, step: int, *rest: Any) -> Any:
        assert asks.wait(60)
        path = publish(folder, checkpoint, step, *rest)
        order.append(f"ends {step}")
        return path

    def asked(locks: FolderLocks, folder: Any) -> Any:
        if locks is second._locks:
            asks.set()
        return turn(locks, folder)

    monkeypatch.setattr(storage, "place_to_write", place_to_write)
    monkeypatch.setattr(storage, "commit", commit)
    monkeypatch.setattr(FolderLocks, "turn", asked)
    saving = first.save_async(place, step=1)
    assert begins.wait(60)
    second.save(place, step=2)
    saving.result(60)
    assert order == ["begins 1", "ends 1", "begins 2", "ends 2"]
    assert [first.load(place, step=step).step for step in (1, 2)] == [1, 2]


@pytest.mark.parametrize("link", [False, True])
def test_a_folder_that_was_moved_is_still_held_by_its_process(link: bool, tmp_path: Path) -> None:
    one, other = _program(), _program()
    one.save(tmp_path / "run", step=1)
    (tmp_path / "run").rename(tmp_path / "moved")
    if link:
        (tmp_path / "run").symlink_to("moved")
    one.save(tmp_path / "moved", step=2)
    other.save(tmp_path / "moved", step=3)
    one.save(tmp_path / "run", step=4)
    assert (tmp_path / "moved/step-00000004").is_dir() == link
    assert other.load(tmp_path / "moved").step == (4 if link else 3) and other.load(tmp_path / "run").step == 4


def test_two_folders_that_change_their_names(tmp_path: Path) -> None:
    program = _program()
    for name, step in (("a", 1), ("b", 2)):
        program.save(tmp_path / name, step=step)
    for before, after in (("a", "c"), ("b", "a"), ("c", "b")):
        (tmp_path / before).rename(tmp_path / after)
    for name, step in (("a", 12), ("b", 11)):
        program.save(tmp_path / name, step=step)
        assert _there(tmp_path / name) == [f"step-{step - 10:08}", f"step-{step:08}"]


def test_folders_that_are_removed_cost_no_descriptors(tmp_path: Path) -> None:
    program = _program()
    for _ in range(3):
        program.save(tmp_path / "run", step=1)
        count = len(os.listdir("/dev/fd"))
        shutil.rmtree(tmp_path / "run")
    program.save(tmp_path / "run", step=1)
    assert len(os.listdir("/dev/fd")) == count


def test_one_program_may_close_while_another_holds_the_folder(place: str) -> None:
    one, other = _program(), _program()
    one.save(place, step=1)
    other.save(place, step=2)
    one.close()
    hold = next(iter(other._locks.held.values()))
    assert hold.lock is not None and hold.lock.in_place()
    other.close()
    assert hold.lock is None


def _forked(work: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except quintnet.CheckpointError as error:
            os._exit(3 if f"process {os.getppid()} on" in str(error) else 1)
        except BaseException:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_fork_does_not_hold_the_lock_of_its_parent(tmp_path: Path) -> None:
    program = _program()
    program.save(tmp_path, step=1)
    assert _forked(lambda: program.save(tmp_path, step=2)) == 3
    program.save(tmp_path, step=3)
    assert _there(tmp_path) == ["step-00000001", "step-00000003"]


def test_a_fork_while_its_parent_saves_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, begun, go_on = _program(), threading.Event(), threading.Event()
    publish = storage.commit

    def commit(*arguments: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return publish(*arguments)

    monkeypatch.setattr(storage, "commit", commit)
    saving = program.save_async(tmp_path, step=1)
    assert begun.wait(60)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking where there are threads
            assert _forked(lambda: program.save(tmp_path, step=2)) == 3
    finally:
        go_on.set()
    assert saving.result(60) == tmp_path / "step-00000001"
    program.save(tmp_path, step=3)
    assert _there(tmp_path) == ["step-00000001", "step-00000003"] and program.load(tmp_path, step=1).step == 1


def test_a_fork_does_not_keep_others_from_writing_when_its_parent_has_ended(tmp_path: Path) -> None:
    program, (ready, say), (wait, leave) = _program(), os.pipe(), os.pipe()

    def work() -> None:
        program.save(tmp_path, step=1)
        if os.fork() == 0:
            os.close(leave)
            os.write(say, b"x")
            os.read(wait, 1)
            os._exit(0)

    assert _forked(work) == 0
    os.read(ready, 1)
    try:
        program.save(tmp_path, step=2)
        assert program.load(tmp_path).step == 2
    finally:
        os.close(leave)


def test_a_holder_that_did_not_write_its_name_is_not_taken_for_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quintnet_compiler.checkpoint.stores.disk_lock._PATIENCE", 0.2)
    program = _program()
    assert _forked(lambda: program.save(tmp_path, step=1)) == 0
    named = (tmp_path / NAME).read_text()
    with _held_by_child(_lock_without_name(tmp_path)) as child:
        with pytest.raises(quintnet.CheckpointError, match=f"has ended; process {child}, perhaps one that") as raised:
            program.save(tmp_path, step=2)
        assert raised.value.code == "QN603" and (tmp_path / NAME).read_text() == named


def test_a_run_is_told_before_its_first_step_that_another_writes(tmp_path: Path) -> None:
    program = _program()
    with _held_by_child(lambda: program.reserve(tmp_path)) as child:
        trainer = quintnet.Trainer(
            program,
            torch.optim.SGD(program.parameters(), lr=0.1),
            DataLoader(TensorDataset(*BATCH), batch_size=8),
            checkpoint_folder=tmp_path,
            console=False,
        )
        with pytest.raises(quintnet.CheckpointError, match=f"process {child} on"):
            trainer.fit()
        assert trainer.history.step == 0


def test_names_from_a_lock_are_shown_and_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = _program()
    (tmp_path / NAME).write_text('{"host": "\\u001b[31mevil\\nQN000", "process": 7, "started": 7}')
    with _held_by_child(_lock_without_name(tmp_path)):
        with pytest.raises(quintnet.CheckpointError, match=r"process 7 on .*evil") as raised:
            program.save(tmp_path, step=1)
        assert "\x1b" not in str(raised.value) and "\nQN000" not in str(raised.value)
