"""The lock of a folder on a disk: its file ``.writer``, locked with ``flock``."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
import warnings
import weakref
from dataclasses import asdict
from pathlib import Path

from ...core.errors import CheckpointError, CheckpointWarning
from ...core.files import open_plain
from ...weights.files import shown
from ..lock import NAME, Holder, refused

_PATIENCE = 20.0  # seconds: processes that a dead writer had forked end within this


class FolderLock:
    """A folder's ``.writer``, locked until this object is gone or the process ends. A fork does not hold it."""

    def __init__(self, folder: Path) -> None:
        """Lock the folder.

        Raises:
            CheckpointError: QN603 if another process writes there, or ``.writer`` is not a plain file.
        """
        self.path, self._process = folder / NAME, os.getpid()
        until = time.monotonic() + _PATIENCE
        while True:
            self._file, writable = self._open()
            self.release = weakref.finalize(self, os.close, self._file)
            try:
                if self._held(until, writable):
                    return
            except BaseException:
                self.release()
                raise
            self.release()

    def in_place(self) -> bool:
        """Return whether this process still holds the folder: somebody may have removed the file."""
        return self._process == os.getpid() and self.release.alive and self._is_there()

    def _open(self) -> tuple[int, bool]:
        """Open the file, or a new one; and return whether it can be written."""
        try:
            return open_plain(self.path, os.O_RDWR | os.O_CREAT), True
        except PermissionError:
            return open_plain(self.path), False
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.EINVAL, errno.EISDIR, errno.ENXIO):
                text = f"{shown(str(self.path))} is a link, or not a plain file: {shown(str(error.strerror))}"
                raise CheckpointError("QN603", text, fix="remove it, or give another folder") from None
            raise

    def _held(self, until: float, writable: bool) -> bool:
        """Lock the file and write who holds it. False if it had to be replaced, or was: another one is to be opened."""
        while not self._try():
            holder = Holder.read(self.path)
            if holder is not None and holder != Holder.here() and not holder.ended():
                raise refused(str(self.path.parent), holder.description)
            if time.monotonic() > until or holder is None:
                raise refused(str(self.path.parent), self._nameless(holder))
            time.sleep(0.1)
        is_there = self._is_there()
        if is_there and writable and os.fstat(self._file).st_nlink == 1:
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, json.dumps(asdict(Holder.here())).encode(), 0)
            return True
        if time.monotonic() > until:
            raise CheckpointError(
                "QN603",
                f"{shown(str(self.path))}: for {_PATIENCE:g} s, what was opened had another number (inode) than what "
                "has that name, or further names",
                fix="end a process that replaces it; if there is none, save where files keep their numbers",
            )
        if is_there:  # of another user, or a copy's file, too
            os.unlink(self.path)
        return False

    def _try(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            message = f"{shown(str(self.path))} cannot be locked ({error.strerror}): only one run may write there"
            warnings.warn(CheckpointWarning(message), stacklevel=2)
        return True

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file), os.lstat(self.path))
        except OSError:
            return False

    def _nameless(self, holder: Holder | None) -> str:
        """Return what is known of a process that holds the file and did not write its name there."""
        others = sorted(self._processes() - {os.getpid()})
        who = f"process {others[0]}" if others else "another process"
        if holder is None or holder == Holder.here():
            return who
        return f"{holder.description}, which {NAME} names, has ended; {who}, perhaps one that it had forked,"

    def _processes(self) -> set[int]:
        """Return the processes that have the file open, as far as this user may see them."""
        mine, having = os.fstat(self._file), set[int]()
        for path in Path("/proc").glob("[0-9]*/fd/*"):
            with contextlib.suppress(OSError):
                if os.path.samestat(path.stat(), mine):
                    having.add(int(path.parts[2]))
        return having
