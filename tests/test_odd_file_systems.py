"""Saves and loads on file systems that do less than a local disk, from moving directories, and ended by Ctrl+C."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import signal
import stat
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import quintnet
from quintnet_compiler.api.compiled_program import CompiledProgram
from quintnet_compiler.checkpoint import background, commit, storage
from quintnet_compiler.checkpoint.lock import NAME, FolderLocks
from quintnet_compiler.checkpoint.reading import choice
from quintnet_compiler.checkpoint.stores import disk_folder, disk_lock
from quintnet_compiler.checkpoint.stores.places import folder_at
from quintnet_compiler.checkpoint.training_state import Destination, Snapshot, write

BATCH = (torch.randn(8, 6), torch.randn(8, 3))


def _program() -> CompiledProgram:
    return quintnet.compile(nn.Linear(6, 3), quintnet.Mesh(dp=1), BATCH, loss_fn=F.mse_loss, check="off")


@pytest.fixture(scope="module")
def program() -> CompiledProgram:
    return _program()


@pytest.fixture(scope="module")
def writer() -> CompiledProgram:
    return _program()


def _there(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name != NAME)


def _calling(patch: pytest.MonkeyPatch, name: str, call: Callable[..., Any]) -> None:
    """Let a function of ``os`` be ``call``, which gets the real one first."""
    real = getattr(os, name)
    patch.setattr(os, name, lambda *args, **options: call(real, *args, **options))


# -- the working directory


def test_a_relative_path_is_that_of_the_call(
    program: CompiledProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves in the background end after the program has gone elsewhere, at least the last one."""
    savings, gone = [], threading.Event()

    def write_when_gone(snapshot: Snapshot, to: Destination, group: Any) -> Path | str:
        assert to.step < 3 or gone.wait(60)
        return write(snapshot, to, group)

    monkeypatch.setattr(background, "write", write_when_gone)
    for number in range(4):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        savings.append(program.save_async("run", step=number))
    monkeypatch.chdir(tmp_path)
    gone.set()
    assert [saving.result(120) for saving in savings] == [tmp_path / f"{n}/run/step-{n:08}" for n in range(4)]
    assert [_there(tmp_path / f"{n}/run") for n in range(4)] == [[f"step-{n:08}"] for n in range(4)]
    assert program.load("3/run").step == 3


def test_a_working_directory_that_was_removed_is_told(
    program: CompiledProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(quintnet.CheckpointError, match=r"QN603(?s:.*)is not there any more"):
        program.save("run", step=1)
    with pytest.raises(quintnet.CheckpointError, match=r"QN601(?s:.*)is not there any more"):
        program.load("run")


@pytest.mark.parametrize("url", ["file://server/run", "file://", "file://run"])
def test_a_url_of_another_host_is_no_folder_here(url: str, program: CompiledProgram) -> None:
    with pytest.raises(quintnet.CheckpointError, match="names no folder of this host"):
        program.save(url, step=1)


# -- what a file system cannot do


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP, errno.ENOSYS])
def test_folders_that_cannot_be_synced(
    code: int, program: CompiledProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(real: Callable[[int], None], descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        real(descriptor)

    _calling(monkeypatch, "fsync", fsync)
    for step in (1, 2, 2, 1):
        program.save(tmp_path, step=step)
    assert program.load(tmp_path).step == 1 and _there(tmp_path) == ["abandoned-01", "step-00000001"]


def test_later_steps_that_cannot_be_moved_leave_no_empty_folder(
    program: CompiledProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As overlayfs refuses to rename folders of its lower layer."""

    def rename(real: Callable[..., None], source: Path, to: Path) -> None:
        if source.name == "step-00000003":
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        real(source, to)

    program.save(tmp_path, step=3)
    with monkeypatch.context() as patch:
        _calling(patch, "rename", rename)
        for says in ("step 1 is whole and has its name", "this save changed no other checkpoint"):
            with pytest.raises(quintnet.CheckpointError, match=says):
                program.save(tmp_path, step=1)
        assert program.load(tmp_path).step == 1
    program.save(tmp_path, step=2)
    assert _there(tmp_path) == ["abandoned-01", "step-00000001", "step-00000002"]


def test_a_lock_that_always_seems_to_have_other_names_is_given_up(
    program: CompiledProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fstat(real: Callable[[int], os.stat_result], descriptor: int) -> os.stat_result:
        fields = list(real(descriptor))
        fields[stat.ST_NLINK] = 2
        return os.stat_result(fields)

    monkeypatch.setattr(disk_lock, "_PATIENCE", 0.1)
    _calling(monkeypatch, "fstat", fstat)
    with pytest.raises(quintnet.CheckpointError, match=r"QN603(?s:.*)had another number"):
        program.save(tmp_path, step=1)


def test_files_whose_numbers_change_all_the_time(
    program: CompiledProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of file systems in user space: the error has the numbers, and names no process."""
    program.save(tmp_path, step=1)
    weight = program.state_dict()["weight"].clone()
    counter = itertools.count(1)

    def fstat(real: Callable[[int], os.stat_result], descriptor: int) -> os.stat_result:
        fields = list(real(descriptor))
        fields[stat.ST_INO] += next(counter) if stat.S_ISREG(fields[stat.ST_MODE]) else 0
        return os.stat_result(fields)

    monkeypatch.setattr(choice, "LOOKS", 3)
    monkeypatch.setattr(disk_lock, "_PATIENCE", 0.1)
    _calling(monkeypatch, "fstat", fstat)
    with pytest.raises(quintnet.CheckpointError, match=r"QN601(?s:.*)manifest.json was listed with .*inode") as caught:
        program.load(tmp_path)
    assert not re.search("replaced|removed|written again", caught.value.message)
    assert torch.equal(program.state_dict()["weight"], weight)
    program._locks.release()
    with pytest.raises(quintnet.CheckpointError, match=r"QN603(?s:.*)had another number"):
        program.save(tmp_path, step=2)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("reads_before", [0, 3, 7, 8])
def test_files_that_another_client_of_a_server_removed(
    reads_before: int,
    program: CompiledProgram,
    writer: CompiledProgram,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their descriptors are stale at once, and the next checkpoint is loaded instead."""
    writer.save(tmp_path, step=1)
    left = [reads_before]

    def require_fresh(descriptor: int | None) -> None:
        path = "" if descriptor is None else os.readlink(f"/proc/self/fd/{descriptor}")
        if path.startswith(str(tmp_path)) and path.endswith(" (deleted)"):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    def preadv(real: Callable[..., int], descriptor: int, *args: Any) -> int:
        left[0] -= 1
        if left[0] == -1:
            with monkeypatch.context() as patch:
                patch.setattr(os, "preadv", real)
                writer.save(tmp_path, step=2, keep=1)
        require_fresh(descriptor)
        return real(descriptor, *args)

    def fstat(real: Callable[[int], os.stat_result], descriptor: int) -> os.stat_result:
        require_fresh(descriptor)
        return real(descriptor)

    def open_fresh(real: Callable[..., int], path: str, *args: Any, dir_fd: int | None = None) -> int:
        require_fresh(dir_fd)
        return real(path, *args, dir_fd=dir_fd)

    for name, call in (("preadv", preadv), ("fstat", fstat), ("open", open_fresh)):
        _calling(monkeypatch, name, call)
    assert program.load(tmp_path).step == 2 and left[0] < 0


# -- Ctrl+C, and signal handlers that exit


@pytest.mark.parametrize(
    ("interrupt", "exchanged"),
    [(KeyboardInterrupt, True), pytest.param(SystemExit, False, marks=pytest.mark.slow)],
)
def test_a_save_that_is_interrupted_anywhere(
    interrupt: type[BaseException], exchanged: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no error of a disk, and leaves the checkpoint of before, or the new one."""
    if not exchanged:
        monkeypatch.setattr(disk_folder.ctypes, "CDLL", lambda *_, **__: object())
    program = _program()
    for number in range(200):
        folder = tmp_path / str(number)
        program.save(folder, step=1, extra={"new": False})
        left = [number]

        def interrupted(real: Callable[..., Any], *args: Any, left: list[int] = left, **options: Any) -> Any:
            result = real(*args, **options)
            left[0] -= 1
            if left[0] == -1:
                raise interrupt
            return result

        with monkeypatch.context() as patch:
            for name in ("mkdir", "rename", "fsync", "open", "rmdir", "unlink"):
                _calling(patch, name, interrupted)
            try:
                program.save(folder, step=1, extra={"new": True})
                saved = True
            except interrupt:
                saved = False
        restored = program.load(folder)
        assert restored.extra["new"] or not saved
        program.save(folder, step=2, keep=1)
        assert _there(folder) == ["step-00000002"]
        if left[0] >= 0:
            assert saved and number > 10
            return
    raise AssertionError("the save never ended")


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _exit(*_: Any) -> None:
    raise SystemExit(3)


def _write_with_interrupts(rank: int, snapshot: Snapshot, folder: Path) -> list[str]:
    """Write while rank 1 is interrupted as it writes, and while rank 0 is when the checkpoint has its name."""
    ends = list[str]()
    for step, interrupted, module, name, interrupt in (
        (1, 1, storage, "write", _interrupt),
        (2, 0, commit, "prune", _exit),
    ):
        with pytest.MonkeyPatch.context() as patch:
            if rank == interrupted:
                patch.setattr(module, name, interrupt)
            try:
                write(snapshot, Destination(folder_at(folder), step, 1, FolderLocks()))
            except BaseException as error:
                ends.append(f"{type(error).__name__} {error}")
    return ends


def _forked_rank(rank: int, work: Callable[[int], list[str]], store: Path) -> tuple[int, int]:
    """Run ``work`` in a forked process, one of two that communicate; return its id, and where its texts are read."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking where there are threads
        child = os.fork()
    if child:
        os.close(write)
        return child, read
    try:
        signal.alarm(120)
        dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
        os.write(write, json.dumps(work(rank)).encode())
    finally:
        os._exit(0)


def test_other_ranks_of_a_save_that_is_interrupted_are_told(program: CompiledProgram, tmp_path: Path) -> None:
    snapshot, folder = program._snapshot(None, None).copy_to_host(), tmp_path / "run"
    ranks = [
        _forked_rank(rank, lambda rank: _write_with_interrupts(rank, snapshot, folder), tmp_path / "store")
        for rank in (0, 1)
    ]
    texts = []
    for child, reading in ranks:
        with open(reading) as pipe:
            texts.append(json.loads(pipe.read()))
        os.waitpid(child, 0)
    [zero, one] = texts
    assert one[0] == "KeyboardInterrupt " and zero[1] == "SystemExit 3"
    assert re.match(r"CheckpointError QN603(?s:.*)rank 1: KeyboardInterrupt(?s:.*)changed no other", zero[0])
    assert re.match(r"CheckpointError QN603(?s:.*)step 2 is whole and has its name(?s:.*)SystemExit: 3", one[1])
    assert _there(folder) == ["step-00000002"]
