"""One process at a time writes checkpoints into a folder."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import warnings
import weakref
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..core.errors import CheckpointError, CheckpointWarning
from ..weights.files import shown
from .folder import CheckpointFolder, WriterLock

NAME = ".writer"
_PATIENCE = 20.0  # seconds: processes that a dead writer had forked end within this


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
            found = json.loads(path.read_bytes()[:4096])
            return cls(str(found["host"]), int(found["process"]), int(found["started"]))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def ended(self) -> bool:
        """Whether it is known to have ended: only of this host's processes."""
        return self.host == socket.gethostname() and _start_of(self.process) != self.started


class FolderLock:
    """A folder's ``.writer``, locked (``flock``) until this object is gone or the process ends."""

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            CheckpointError: QN603 if another process writes there.
        """
        self.path = folder / NAME
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        self.release = weakref.finalize(self, os.close, self._file)
        try:
            self._lock()
        except BaseException:
            self.release()
            raise

    def in_place(self) -> bool:
        """Whether the folder still has the file that is locked: somebody may have removed it."""
        try:
            return self.release.alive and os.path.samestat(os.fstat(self._file), os.stat(self.path))
        except OSError:
            return False

    def _lock(self) -> None:
        until = time.monotonic() + _PATIENCE
        while not self._try():
            holder = Holder.read(self.path)
            if holder == Holder.here():  # of another program of this process
                self.release()
                return
            if time.monotonic() > until or holder is None or not holder.ended():
                who = f"process {holder.process} on {shown(holder.host)}" if holder else "another process"
                raise CheckpointError(
                    "QN603",
                    f"{shown(str(self.path.parent))}: {who} writes its checkpoints there, and holds {NAME}",
                    fix="give each run a folder of its own, or end the other one",
                )
            time.sleep(0.1)

    def _try(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            message = f"{shown(str(self.path))} cannot be locked ({error.strerror}): only one run may write there"
            warnings.warn(CheckpointWarning(message), stacklevel=2)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, json.dumps(asdict(Holder.here())).encode(), 0)
        return True


@dataclass(frozen=True)
class FolderLocks:
    """Those that a program holds: it keeps the folders that it saved to."""

    held: dict[str, WriterLock] = field(default_factory=dict)

    def take(self, folder: CheckpointFolder) -> None:
        """Raises: CheckpointError: QN603 if another process writes there."""
        place = str(folder.path.resolve() if isinstance(folder.path, Path) else folder.path)
        if place not in self.held or not self.held[place].in_place():
            self.held[place] = folder.lock()

    def release(self) -> None:
        """Others may write there from now on."""
        for lock in self.held.values():
            lock.release()
        self.held.clear()


def _start_of(process: int) -> int | None:
    """None if there is no such process, or it has ended and was not waited for."""
    try:
        after = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if after[0] in "ZX" else int(after[19])
