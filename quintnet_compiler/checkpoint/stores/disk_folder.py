"""A folder of checkpoints on a file system: a checkpoint gets its name by ``rename``.

``step-00000042`` is a complete checkpoint. ``.step-00000042.<token>.tmp`` is one that is being written, or was when its
writer died; ``.old`` is one that a writer moved away before it put another in its place, on a file system that cannot
exchange two names. ``abandoned-01/`` has the checkpoints of a run that went on from an earlier step.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from ..folder import CheckpointFiles, Entry, abandoned_name, name_of
from ..lock import FolderLock
from ..reading.open_files import OpenFiles
from .disk import NewDiskFile, created, sync
from .disk_reading import named, open_folder_to_read, twice

_NAME = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.step-(\d{8,})\.[0-9a-f]{8}\.(tmp|old)")
_ABANDONED = re.compile(r"abandoned-(\d{2,})")
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
        return self._matching(_NAME)

    def leftovers(self) -> list[Entry]:
        return sorted(self._matching(_LEFTOVER), key=lambda entry: (-entry.step, not entry.files.name.endswith(".tmp")))

    def abandoned(self) -> Sequence[DiskFolder]:
        found = [(int(match[1]), path) for path, match in self._folders(_ABANDONED)]
        return [DiskFolder(path) for _, path in sorted(found, reverse=True)]

    def at(self, name: str) -> DiskFiles:
        return DiskFiles(self.path / name)

    def lock(self) -> FolderLock:
        self.path.mkdir(parents=True, exist_ok=True)
        return FolderLock(self.path.resolve())

    def new(self, step: int) -> DiskFiles:
        made = self.path / f".{name_of(step)}.{secrets.token_hex(4)}.tmp"
        made.mkdir()
        return DiskFiles(made)

    def publish(self, made: CheckpointFiles, step: int) -> DiskFiles:
        temporary, final = self.path / made.name, self.path / name_of(step)
        sync(temporary)
        if final.exists():
            _exchange(temporary, final)
        else:
            os.rename(temporary, final)
        sync(self.path)
        _remove(temporary)  # what had the name before
        return DiskFiles(final)

    def set_aside(self, entries: Sequence[Entry]) -> None:
        last = next(iter(self.abandoned()), None)
        aside = self.path / abandoned_name(1 if last is None else int(last.path.name.rpartition("-")[2]) + 1)
        aside.mkdir()
        for entry in entries:
            os.rename(self.path / entry.files.name, aside / entry.files.name)
        sync(aside)

    def remove(self, files: CheckpointFiles) -> None:
        _remove(self.path / files.name)

    def remove_if_empty(self) -> None:
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def _matching(self, pattern: re.Pattern[str]) -> list[Entry]:
        found = (Entry(int(match[1]), DiskFiles(path)) for path, match in self._folders(pattern))
        return sorted(found, key=lambda entry: -entry.step)

    def _folders(self, pattern: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
        there = ((self.path / name, pattern.fullmatch(name)) for name in twice(self._folder_names))
        return [(path, match) for path, match in there if match]

    def _folder_names(self) -> list[str]:
        """Return names of folders in this one, which may not be there. Raises: OSError if they cannot be read."""
        try:
            with os.scandir(self.path) as entries:
                return [entry.name for entry in entries if entry.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as error:
            raise named(error, self.path) from error


def _exchange(one: Path, other: Path) -> None:
    """Both names in one step (renameat2), or, where the file system cannot, in two: what a kill between them leaves is
    found by :func:`..manifest.available`, and named again by the next writer."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        if not libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
            return
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise OSError(code, os.strerror(code), str(other))
    old = one.with_suffix(".old")
    os.rename(other, old)
    os.rename(one, other)
    sync(other.parent)
    _remove(old)


def _remove(path: Path) -> None:
    """A folder, or a link to one: what it points to stays."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
