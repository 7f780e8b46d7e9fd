"""Folders on a disk that are read while others rename, replace and remove them: through descriptors, not by names.

A folder's descriptor stays that of the same folder whatever happens to its path, and a file's that of the same bytes
when it is removed. As many files are kept open as the process's limit leaves room for; others are opened again when
they are read, in the same folder, and compared with what it listed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from ..reading.open_files import FileStamp, OpenFiles, VanishedError

BYTES_AT_ONCE = 256 * 2**10  # what is hashed and copied next is still in the cache of a core
SHARE_OF_DESCRIPTORS = 4  # one in so many of those that are free is used: others need some, too
MOST_KEPT = 4096  # descriptors
TRANSIENT = (errno.EIO, errno.ESTALE)  # tried once more
_EXHAUSTED = (errno.EMFILE, errno.ENFILE)
T = TypeVar("T")


@contextlib.contextmanager
def open_folder_to_read(path: Path) -> Iterator[OpenFiles]:
    """Open a folder of files.

    Raises:
        VanishedError: if there is none.
        OSError: naming it.
    """
    with contextlib.ExitStack() as stack:
        try:
            descriptor = twice(lambda: os.open(path, os.O_RDONLY | os.O_DIRECTORY))
            stack.callback(close_quietly, descriptor)
            stamps = twice(lambda: _stamps(descriptor))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise VanishedError(f"{path.name} is not there any more") from error
        except OSError as error:
            raise with_path(error, path) from error
        folder = _OpenFolder(path, descriptor, stamps, {})
        for name in sorted(name for name, stamp in stamps.items() if stamp.size is not None)[: _room()]:
            if not folder.keep_open(name, stack):
                break
        yield OpenFiles(path, stamps, folder.fill, folder.replaced, folder.written_again, BYTES_AT_ONCE)


class _OpenFolder:
    """A folder's descriptor, what it lists, and descriptors of some of its files."""

    def __init__(self, path: Path, descriptor: int, stamps: Mapping[str, FileStamp], kept: dict[str, int]) -> None:
        self.path, self.descriptor, self.stamps, self.kept = path, descriptor, stamps, kept
        self._status = os.fstat(descriptor)  # now: what was removed on a server can no longer be asked

    def keep_open(self, name: str, stack: contextlib.ExitStack) -> bool:
        """Keep a file open, if that is possible; return whether there is room for more."""
        try:
            self.kept[name] = self._open(name)
        except OSError as error:
            return error.errno not in _EXHAUSTED  # why it cannot be opened is said when it is read
        except VanishedError:
            return True
        stack.callback(close_quietly, self.kept[name])
        return True

    def fill(self, name: str, offset: int, into: memoryview) -> None:
        """Fill ``into`` with bytes of a file. A file that cannot be read is opened once more and read again.

        Raises:
            VanishedError: if the file is no longer what it was; on a network's file system, also if the folder was
                removed or replaced: its open files are gone, too.
            OSError: naming the file.
        """
        try:
            self._fill(name, self.kept.get(name), offset, into)
        except OSError as error:
            if error.errno not in TRANSIENT:
                raise
            try:
                self._fill(name, None, offset, into)
            except OSError as second:
                if second.errno == errno.ESTALE and self.replaced():
                    raise VanishedError(f"{name} was removed") from second
                raise

    def replaced(self) -> bool:
        """Return whether the path is another folder's, or nobody's."""
        try:
            return not os.path.samestat(os.stat(self.path), self._status)
        except (FileNotFoundError, NotADirectoryError):
            return True

    def written_again(self, names: Collection[str]) -> list[str]:
        """Return those of ``names`` that have other bytes or a later time. What was removed has not changed."""
        return [name for name in names if (now := self._now(name)) is not None and now != self.stamps[name]]

    def _now(self, name: str) -> FileStamp | None:
        try:
            if name in self.kept:
                return _stamp(os.fstat(self.kept[name]))
            return _stamp(os.stat(name, dir_fd=self.descriptor, follow_symlinks=False))
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.ESTALE:
                return None
            raise

    def _open(self, name: str) -> int:
        try:
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=self.descriptor)
        except FileNotFoundError as error:
            raise VanishedError(f"{name} was removed") from error
        stamp = _stamp(os.fstat(descriptor))
        if stamp != self.stamps[name]:
            close_quietly(descriptor)
            raise _is_another(name, stamp, self.stamps[name])
        return descriptor

    def _fill(self, name: str, kept: int | None, offset: int, into: memoryview) -> None:
        descriptor = kept
        try:
            if descriptor is None:
                descriptor = self._open(name)
            while len(into):
                count = os.preadv(descriptor, [into], offset)
                if not count:
                    raise VanishedError(f"{name} ends at byte {offset}")
                offset, into = offset + count, into[count:]
        except OSError as error:
            raise with_path(error, self.path / name) from error
        finally:
            if descriptor is not None and descriptor != kept:
                close_quietly(descriptor)


def close_quietly(descriptor: int) -> None:
    """Close a file that was read: what a disk says of that changes nothing of the bytes."""
    with contextlib.suppress(OSError):
        os.close(descriptor)


def twice(call: Callable[[], T]) -> T:
    """Return what ``call`` returns; after an error that may be gone a moment later, that of a second call."""
    try:
        return call()
    except OSError as error:
        if error.errno not in TRANSIENT:
            raise
        return call()


def with_path(error: OSError, path: Path) -> OSError:
    """Return an error of the system with the path of its file."""
    if error.errno is None:
        return error
    return OSError(error.errno, os.strerror(error.errno), str(path))


def _is_another(name: str, opened: FileStamp, listed: FileStamp) -> VanishedError:
    """Return the error of a file that others replaced or wrote, or whose file system gives it another number."""
    words = [f"{stamp.size} bytes, device:inode:time {stamp.version}" for stamp in (listed, opened)]
    return VanishedError(f"{name} was listed with {words[0]}, and opened with {words[1]}")


def _stamps(folder: int) -> dict[str, FileStamp]:
    with os.scandir(folder) as entries:
        names = [entry.name for entry in entries]
    stamps = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile
            stamps[name] = _stamp(os.stat(name, dir_fd=folder, follow_symlinks=False))
    return stamps


def _stamp(status: os.stat_result) -> FileStamp:
    size = status.st_size if stat.S_ISREG(status.st_mode) else None
    return FileStamp(size, f"{status.st_dev}:{status.st_ino}:{status.st_mtime_ns}")


def _room() -> int:
    """Return how many files may be kept open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MOST_KEPT
    try:
        used = len(os.listdir("/dev/fd"))
    except OSError:  # there is no descriptor left to list them, or no such folder
        used = limit // 2
    return max(0, min(MOST_KEPT, (limit - used) // SHARE_OF_DESCRIPTORS))
