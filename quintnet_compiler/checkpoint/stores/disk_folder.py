"""A folder of checkpoints on a file system: a checkpoint gets its name by ``rename``.

``step-00000042`` is a complete checkpoint. ``.step-00000042.<token>.tmp`` is one that is being written, or was when its
writer died; ``.old`` is one that a writer moved away before it put another in its place, on a file system that cannot
exchange two names. ``abandoned-01/`` has the checkpoints of a run that went on from an earlier step.

A link ``step-00000042`` is read, as people make them to share a checkpoint; it is removed, and not what it leads to. No
other link is followed, whatever its name.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import CheckpointError, CheckpointWarning
from ...core.files import open_plain
from ...weights.files import shown
from ..documents import is_checkpoint
from ..folder import (
    ABANDONED_NAME,
    MARK,
    STEP_NAME,
    CheckpointFiles,
    Entry,
    PublishedError,
    abandoned_name,
    name_of,
)
from ..reading.open_files import OpenFiles
from .disk import NewDiskFile, created, sync
from .disk_lock import FolderLock
from .disk_reading import open_folder_to_read, twice, with_path

_NAME = re.compile(STEP_NAME)
_LEFTOVER = re.compile(rf"\.{STEP_NAME}\.[0-9a-f]{{8}}\.(tmp|old)")
_ABANDONED = re.compile(ABANDONED_NAME)
_NEW_MARK = f"{MARK}.part"
_LARGEST_MARK = 4096  # bytes
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fs.h


@dataclass(frozen=True)
class DiskFiles:
    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    def open(self) -> AbstractContextManager[OpenFiles]:
        return open_folder_to_read(self.path)

    def create(self, name: str) -> AbstractContextManager[NewDiskFile]:
        return created(self.path / name)


@dataclass(frozen=True)
class DiskFolder:
    path: Path

    def named(self) -> list[Entry]:
        return self._matching(_NAME, linked=True)

    def leftovers(self) -> list[Entry]:
        entries = self._matching(_LEFTOVER, linked=False)
        return sorted(entries, key=lambda entry: (-entry.step, not entry.files.name.endswith(".tmp")))

    def unusable(self) -> list[str]:
        return sorted(entry.name for entry, _ in self._listed(_NAME) if not _is_folder(entry, linked=True))

    def abandoned(self) -> Sequence[DiskFolder]:
        folders = [
            (int(match[1]), entry) for entry, match in self._listed(_ABANDONED) if _is_folder(entry, linked=False)
        ]
        return [DiskFolder(self.path / entry.name) for _, entry in sorted(folders, key=lambda pair: -pair[0])]

    def at(self, name: str) -> DiskFiles:
        return DiskFiles(self.path / name)

    def lock(self) -> FolderLock:
        if is_checkpoint(self.path):
            text = f"{shown(str(self.path))} is a checkpoint, which would count as damaged with another one in it"
            raise CheckpointError("QN603", text, fix="give the folder that has it")
        self.path.mkdir(parents=True, exist_ok=True)
        return FolderLock(self.path.resolve())

    def new(self, step: int) -> DiskFiles:
        _require_folder_or_nothing(self.path / name_of(step))
        temporary = self.path / f".{name_of(step)}.{secrets.token_hex(4)}.tmp"
        temporary.mkdir()
        return DiskFiles(temporary)

    def publish(self, checkpoint: CheckpointFiles, step: int) -> DiskFiles:
        temporary, final = self.path / checkpoint.name, self.path / name_of(step)
        sync(temporary)
        _require_folder_or_nothing(final)
        if os.path.lexists(final):
            _exchange(temporary, final)
        else:
            os.rename(temporary, final)
        with PublishedError.instead():
            sync(self.path)
            _remove(temporary)  # the checkpoint that was replaced, if any
        return DiskFiles(final)

    def write_mark(self, text: str) -> None:
        self.remove_mark()
        with created(self.path / _NEW_MARK) as file:
            file.write([memoryview(text.encode())])
        os.rename(self.path / _NEW_MARK, self.path / MARK)
        sync(self.path)

    def read_mark(self) -> bytes:
        try:
            with open(open_plain(self.path / MARK), "rb") as file:
                return file.read(_LARGEST_MARK)
        except FileNotFoundError:
            return b""

    def remove_mark(self) -> None:
        for name in (MARK, _NEW_MARK):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path / name)

    def set_aside(self, entries: Sequence[Entry]) -> None:
        numbers = [int(match[1]) for _, match in self._listed(_ABANDONED)]
        aside = DiskFolder(self.path / abandoned_name(max(numbers, default=0) + 1))
        aside.path.mkdir()
        try:
            for entry in entries:
                os.rename(self.path / entry.files.name, aside.path / entry.files.name)
        except BaseException:
            aside.remove_if_empty()
            raise
        sync(aside.path)

    def remove(self, files: CheckpointFiles) -> None:
        _remove(self.path / files.name)

    def remove_if_empty(self) -> None:
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def _matching(self, pattern: re.Pattern[str], *, linked: bool) -> list[Entry]:
        entries = [
            Entry(int(match[1]), DiskFiles(self.path / entry.name))
            for entry, match in self._listed(pattern)
            if _is_folder(entry, linked=linked)
        ]
        return sorted(entries, key=lambda entry: -entry.step)

    def _listed(self, pattern: re.Pattern[str]) -> list[tuple[os.DirEntry[str], re.Match[str]]]:
        matches = ((entry, pattern.fullmatch(entry.name)) for entry in twice(self._entries))
        return [(entry, match) for entry, match in matches if match]

    def _entries(self) -> list[os.DirEntry[str]]:
        """Return what is in this folder, which may not be there. Raises: OSError if it cannot be read."""
        try:
            with os.scandir(self.path) as entries:
                return list(entries)
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise with_path(error, self.path) from error


def _is_folder(entry: os.DirEntry[str], *, linked: bool) -> bool:
    """Return whether it is a folder or, if ``linked``, a link to one."""
    try:
        return entry.is_dir(follow_symlinks=linked)
    except OSError as error:
        if error.errno == errno.ELOOP:  # a link to itself
            return False
        raise with_path(error, Path(entry.path)) from error


def _require_folder_or_nothing(path: Path) -> None:
    """Refuse to replace what is no checkpoint.

    Raises:
        FileExistsError: for what is neither a folder nor a link to one.
    """
    if os.path.lexists(path) and not path.is_dir():
        raise FileExistsError(f"{path} is no checkpoint, and would be replaced by one: move it away")


def _exchange(temporary: Path, final: Path) -> None:
    """Exchange two names at once (renameat2), or, where the file system cannot, in two steps: what a kill between
    them leaves is found by :func:`..manifest.available`, and named again by the next writer."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        if not libc.renameat2(_AT_FDCWD, os.fsencode(temporary), _AT_FDCWD, os.fsencode(final), _RENAME_EXCHANGE):
            return
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise OSError(code, os.strerror(code), str(final))
    old = temporary.with_suffix(".old")
    os.rename(final, old)
    try:
        os.rename(temporary, final)
    except OSError:
        os.rename(old, final)
        raise
    with PublishedError.instead():
        sync(final.parent)
        _remove(old)


def _remove(path: Path) -> None:
    """Remove a folder, or a link to one but not what it leads to. Warn of what cannot be removed: it takes room."""
    if path.is_symlink():
        path.unlink()
        return
    errors: list[BaseException] = []
    shutil.rmtree(path, onerror=lambda _, __, error: errors.append(error[1]))
    if errors and os.path.lexists(path):
        text = f"{shown(str(path))} cannot be removed: {shown(str(errors[0]))}"
        warnings.warn(CheckpointWarning(text), stacklevel=2)
