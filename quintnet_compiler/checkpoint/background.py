"""Saving while training goes on."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from pathlib import Path

import torch.distributed as dist

from ..compat.interpreter import call_once
from ..core.errors import CheckpointError, CheckpointWarning
from ..runtime.threads.at_exit import PATIENCE, finish_at_exit
from ..runtime.threads.room import start_thread
from ..runtime.transport.groups import new_group
from ..weights.files import shown
from .folder import name_of
from .staging import Staging
from .training_state import Destination, Snapshot, write


class Saving(Future[Path | str]):
    """A save under way. It cannot be cancelled: other ranks take part.

    Attributes:
        where: the folder and the checkpoint's name, for errors.
        asked: whether ``result`` or ``exception`` has said how it ended; if not, a failure is raised later.
        thread: writes it. It is over when this has ended: freeing tensors while the interpreter ends would abort.
    """

    def __init__(self, to: Destination, write_to: Callable[[Saving], None]) -> None:
        """Prepare the thread that calls ``write_to``, which sets the result."""
        super().__init__()
        self.where = f"{shown(str(to.folder.path))}: {name_of(to.step)}"
        self.asked = False
        # as a daemon: the process's exit waits for it by itself, and not for ever
        self.thread = threading.Thread(target=write_to, args=(self,), name="quintnet-save", daemon=True)
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> Path | str:
        try:
            return super().result(timeout)
        finally:
            self.asked = self.asked or self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        try:
            return super().exception(timeout)
        finally:
            self.asked = self.asked or self.done()

    @property
    def over(self) -> bool:
        """Return whether nothing is left to do or to raise."""
        return self.done() and not self.thread.is_alive() and self._untold() is None

    def wait(self) -> None:
        """Wait until it has ended, however that is."""
        super().exception()

    def finish(self, seconds: float) -> None:
        """Wait until it has ended.

        Raises:
            CheckpointError: QN603 if it takes longer than ``seconds``; or if it failed, and nobody has asked.
        """
        if self.thread.ident is not None:  # it was started
            self.thread.join(seconds)
        if self.thread.is_alive():
            raise CheckpointError(
                "QN603",
                f"{self.where}: save_async was still writing it after {seconds:.0f} s more, and it is given up",
                fix="wait for the result() of the last save_async",
            )
        if (error := self._untold()) is not None:
            self.asked = True
            raise self._failed(error) from error

    def warn(self) -> None:
        """Warn of a failure of which nobody has asked, once."""
        if self.done() and (error := self._untold()) is not None:
            self.asked = True
            warnings.warn(CheckpointWarning(str(self._failed(error))), stacklevel=5)

    def _untold(self) -> BaseException | None:
        return None if self.asked else super().exception()

    def _failed(self, error: BaseException) -> CheckpointError:
        text = error.message if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        return CheckpointError(
            "QN603",
            f"{self.where} was not written: save_async failed, and nobody asked for its result\n  {text}",
            fix="call result() of what save_async returns",
        )


@dataclass
class SaveLine:
    """Saves of a process, one after the other, each in a thread; over a process group of their own: steps go on over
    theirs. All programs of a process share it."""

    group: dist.ProcessGroup | None
    process: int = field(default_factory=os.getpid)
    last: Saving | None = None
    turn: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, snapshot: Snapshot, to: Destination) -> Saving:
        """Write ``snapshot``, which is a copy, in a thread; or at once, where none can start."""
        write_to = functools.partial(_write, snapshot, to, self.group)
        saving = self.last = Saving(to, functools.partial(_in_background, write_to))
        try:
            start_thread(saving.thread)
        except RuntimeError:  # of this rank; others have one, which takes part in what this one writes
            write_to(saving)
        finish_at_exit(saving)
        return saving

    def wait(self) -> None:
        """Until no save is under way; warn if the last one failed, and nobody asked."""
        if self.last is not None:
            self.last.wait()
            self.last.warn()


@dataclass
class Background:
    """A program's saves. ``staging``: its own, which is freed with it."""

    line: SaveLine
    staging: Staging = field(default_factory=Staging)

    @classmethod
    def make(cls) -> Background:
        """Every rank must call this at the same time."""
        spread = dist.is_initialized() and dist.get_world_size() > 1
        return cls(_line_of(dist.group.WORLD if spread else None, os.getpid()))

    def save(self, snapshot: Snapshot, to: Destination, together: contextlib.AbstractContextManager[None]) -> Saving:
        """Wait for the last save, copy the snapshot (over the copy of the last one), and write it in a thread.

        Args:
            snapshot: what is saved.
            to: where.
            together: raises on every rank what is raised on one: a save that only some ranks begin would be mixed with
                the next one.
        """
        if self.line.process != os.getpid():  # forked: threads stayed behind
            self.line, self.staging = _line_of(None, os.getpid()), Staging()
        with self.line.turn:
            with together:
                self.line.wait()
                copied = snapshot.copy_to_host(self.staging.copies)
            return self.line.begin(copied, to)

    def wait(self) -> None:
        """Until no save is under way; warn if the last one failed, and nobody asked."""
        if self.line.process == os.getpid():
            self.line.wait()

    def close(self) -> None:
        """As :meth:`wait`.

        Raises:
            CheckpointError: QN603 if that takes too long.
        """
        last = self.line.last
        if last is not None and self.line.process == os.getpid() and wait_for([last], PATIENCE).not_done:
            last.finish(0.0)
        self.wait()


@call_once
def _line_of(world: dist.ProcessGroup | None, process: int) -> SaveLine:
    """Return the line of a world; that of an earlier world is forgotten."""
    return SaveLine(None if world is None else new_group(backend="gloo"))


def _in_background(write_to: Callable[[Saving], None], saving: Saving) -> None:
    with contextlib.suppress(OSError):
        _step_back()
    write_to(saving)


def _write(snapshot: Snapshot, to: Destination, group: dist.ProcessGroup | None, saving: Saving) -> None:
    try:
        path = write(snapshot, to, group)
    except BaseException as error:
        saving.set_exception(error if group is None or dist.is_initialized() else _left(saving, error))
    else:
        saving.set_result(path)


def _left(saving: Saving, cause: BaseException) -> CheckpointError:
    """Return the error of a save whose ranks can no longer talk."""
    error = CheckpointError(
        "QN603",
        f"{saving.where} was not written: the process group was destroyed before save_async had ended",
        fix="call result() of what save_async returns, and then destroy_process_group()",
    )
    error.__cause__ = cause
    return error


def _step_back() -> None:
    """Let steps have a core that this thread and those that it starts want, too: Linux gives each thread a niceness of
    its own, and ten times the share to one that has the usual one."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
