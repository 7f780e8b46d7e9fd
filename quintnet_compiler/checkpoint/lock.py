"""One process at a time writes checkpoints into a folder, and its programs take turns."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ..compat.interpreter import call_once
from ..core.errors import CheckpointError
from ..core.files import open_plain
from ..weights.files import shown

if TYPE_CHECKING:
    from .folder import CheckpointFolder, WriterLock

NAME = ".writer"
_LARGEST = 4096  # bytes


@dataclass(frozen=True)
class Holder:
    """Who writes. ``started``: the process's start in the kernel's clock ticks, as process ids are used again."""

    host: str
    process: int
    started: int

    @classmethod
    def here(cls) -> Holder:
        return cls(socket.gethostname(), os.getpid(), _start_of(os.getpid()) or 0)

    @classmethod
    def read(cls, path: Path) -> Holder | None:
        try:
            with open(open_plain(path), "rb") as file:
                return cls.from_document(file.read(_LARGEST))
        except OSError:
            return None

    @classmethod
    def from_document(cls, text: bytes) -> Holder | None:
        """Return the process that a document names, or None if it names none."""
        try:
            document = json.loads(text)
            return cls(str(document["host"]), int(document["process"]), int(document["started"]))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return None

    def ended(self) -> bool:
        """Return whether it is known to have ended: only of this host's processes."""
        return self.host == socket.gethostname() and _start_of(self.process) != self.started

    @property
    def description(self) -> str:
        """Return what errors call it."""
        return f"process {self.process} on {shown(self.host)}"


def refused(where: str, who: str) -> CheckpointError:
    """Return the error of a run that may not write."""
    return CheckpointError(
        "QN603",
        f"{shown(where)}: {who} writes its checkpoints there, and holds {NAME}",
        fix="give each run a folder of its own, or end the other one",
    )


@dataclass(eq=False)
class FolderHold:
    """A folder that programs of this process write to, one at its ``turn``. All of them share its lock."""

    turn: threading.RLock = field(default_factory=threading.RLock)
    lock: WriterLock | None = None
    users: weakref.WeakSet[FolderLocks] = field(default_factory=weakref.WeakSet)
    _mutex: threading.Lock = field(default_factory=threading.Lock)

    def take(self, folder: CheckpointFolder, user: FolderLocks) -> None:
        """Hold the folder for one more program.

        Raises:
            CheckpointError: QN603 if another process writes there.
        """
        with self._mutex:
            if self.lock is None or not self.lock.in_place():
                self.lock = None  # before there is another
                self.lock = folder.lock()
            self.users.add(user)

    def drop_user(self, user: FolderLocks) -> None:
        """Let others have the folder, if no other program of this process has it."""
        with self._mutex:
            self.users.discard(user)
            if not self.users and self.lock is not None:
                self.lock.release()
                self.lock = None

    def after_fork(self) -> None:
        """Give up in a fork what its parent holds, and goes on to hold."""
        self.turn, self._mutex = threading.RLock(), threading.Lock()
        if self.lock is not None:
            self.lock.release()
            self.lock = None


@dataclass(frozen=True)
class ProcessHolds:
    """The folders that this process writes to, by their identity, as long as a program has them."""

    _folders: weakref.WeakValueDictionary[str, FolderHold] = field(default_factory=weakref.WeakValueDictionary)
    _mutex: list[threading.Lock] = field(default_factory=lambda: [threading.Lock()])

    def folder_hold(self, identity: str) -> FolderHold:
        """Return the hold of a folder, the same one for all programs."""
        with self._mutex[0]:
            return self._folders.setdefault(identity, FolderHold())

    def after_fork(self) -> None:
        """Give up in a fork what its parent holds."""
        self._mutex[0] = threading.Lock()
        for hold in list(self._folders.values()):
            hold.after_fork()


@dataclass(frozen=True, eq=False)
class FolderLocks:
    """Those that a program holds: it keeps the folders that it saved to.

    Attributes:
        held: by the paths that it was given.
    """

    held: dict[str, FolderHold] = field(default_factory=dict)

    def take(self, folder: CheckpointFolder) -> None:
        """Raises: CheckpointError: QN603 if another process writes there."""
        self._hold(folder).take(folder, self)

    @contextlib.contextmanager
    def turn(self, folder: CheckpointFolder) -> Iterator[None]:
        """Wait until no other program of this process writes into a folder, and let none write meanwhile."""
        with self._hold(folder).turn:
            yield

    def release(self) -> None:
        """Others may write there from now on."""
        for hold in self.held.values():
            hold.drop_user(self)
        self.held.clear()

    def _hold(self, folder: CheckpointFolder) -> FolderHold:
        """Return the hold of a folder, which is that of its earlier names, too."""
        path, hold = str(folder.path), _holds().folder_hold(_identity(folder))
        previous = self.held.get(path)
        self.held[path] = hold
        if previous is not None and not any(other is previous for other in self.held.values()):
            previous.drop_user(self)  # that folder was moved or removed
        return hold


def _identity(folder: CheckpointFolder) -> str:
    """Return what tells a folder, made if it is not there, from all others: it may be moved, or have links."""
    if isinstance(folder.path, Path):
        with contextlib.suppress(OSError, ValueError):  # taking the lock says it
            folder.path.mkdir(parents=True, exist_ok=True)
            status = folder.path.stat()
            return f"{status.st_dev}:{status.st_ino}"
    return str(folder.path)


@call_once
def _holds() -> ProcessHolds:
    holds = ProcessHolds()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=holds.after_fork)
    return holds


def _start_of(process: int) -> int | None:
    """None if there is no such process, or it has ended and was not waited for."""
    try:
        after = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if after[0] in "ZX" else int(after[19])
