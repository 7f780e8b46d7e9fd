"""Temporary folders that go with the process that made them, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.util import get_temp_dir
from pathlib import Path

from ...compat.interpreter import call_once
from . import board

PREFIX = "quintnet-"
KINDS = (PREFIX, "pymp-")  # the second: multiprocessing's, for the socket of the fork server
MARK = ".quintnet"  # locked (flock) by the processes that use the folder, until they end
MOMENT = 0.2  # seconds until all files of a process that ends are unlocked
YOUNGEST = 1.0  # seconds: a mark that is younger may not be locked yet


def new_folder() -> Path:
    """For what ranks of a run leave."""
    return Path(tempfile.mkdtemp(prefix=PREFIX))


@contextlib.contextmanager
def run_folder(folder: Path) -> Iterator[Path]:
    """Use a temporary folder inside, perhaps with other processes; afterwards, only stacks are kept of it.

    If a signal ends them all, the folder is removed by their ranks, or by the next run of this user.
    """
    remove_abandoned()
    mark = _marked(folder)
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # others tidy it up, too
            keep_folder(folder)
            for file in folder.glob(f"**/{board.NAME}"):
                file.unlink(missing_ok=True)
            for path in [*folder.iterdir(), folder]:
                if path.is_dir() and not any(path.iterdir()):
                    path.rmdir()
        if mark is not None:
            os.close(mark)


@call_once
def mark_fork_server_folder() -> None:
    """Mark multiprocessing's folder, which it removes when this process exits, but not when a signal ends it."""
    _marked(Path(get_temp_dir()))


def remove_fork_server_folder() -> None:
    """Before a signal ends this process."""
    shutil.rmtree(get_temp_dir(), ignore_errors=True)


def keep_folder(folder: Path) -> None:
    """Let a folder stay: somebody will read it."""
    (folder / MARK).unlink(missing_ok=True)


def remove_with_its_owner(folder: Path) -> None:
    """Remove a folder whose process ends, and its others: one moment passes until all of its files are unlocked."""
    until = time.monotonic() + MOMENT
    while folder.exists() and time.monotonic() < until:
        remove_abandoned()
        time.sleep(0.01)
    remove_abandoned()


def remove_abandoned() -> None:
    """Remove marked folders of this user whose process has ended."""
    for entry in os.scandir(tempfile.gettempdir()):
        if entry.name.startswith(KINDS) and _abandoned(entry):
            shutil.rmtree(entry.path, ignore_errors=True)


def _marked(folder: Path) -> int | None:
    """The locked mark; None where files cannot be locked: nobody will remove the folder then."""
    mark = os.open(folder / MARK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(mark, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        os.close(mark)
        keep_folder(folder)
        return None
    return mark


def _abandoned(entry: os.DirEntry[str]) -> bool:
    try:
        if not entry.is_dir(follow_symlinks=False) or entry.stat(follow_symlinks=False).st_uid != os.getuid():
            return False
        mark = os.open(Path(entry.path, MARK), os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:  # others', without a mark, or gone meanwhile
        return False
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return time.time() - os.fstat(mark).st_mtime > YOUNGEST
    except OSError:
        return False
    finally:
        os.close(mark)


def end_with_launcher(rank: int, folder: Path) -> None:
    """End this rank at once when the launching process ends, and remove the run's folder.

    A rank that trained on would write into the checkpoints of the run that follows.
    """
    if (parent := multiprocessing.parent_process()) is None:
        return

    def end() -> None:
        parent.join()
        if rank == 0:
            print("all ranks end: the process that launched them is gone", file=sys.stderr, flush=True)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch would print it in 30 lines of C++
        remove_with_its_owner(folder)
        os._exit(1)

    threading.Thread(target=end, daemon=True, name="quintnet-parent").start()
