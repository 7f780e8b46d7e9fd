"""Files on a disk: written so that they survive a crash of the machine."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_FOLDERS_NOT_SYNCED = (errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP, errno.ENOSYS)  # what file systems say of it


@dataclass
class NewDiskFile:
    """A file that is written, opened by :func:`created`."""

    file: BinaryIO
    written: int = 0

    def write(self, piece: Sequence[memoryview]) -> None:
        self.file.writelines(piece)
        self.file.flush()
        size = sum(map(len, piece))
        if hasattr(os, "posix_fadvise"):  # the kernel starts to write it now, not when fsync waits for it
            os.posix_fadvise(self.file.fileno(), self.written, size, os.POSIX_FADV_DONTNEED)
        self.written += size


@contextlib.contextmanager
def created(path: Path) -> Iterator[NewDiskFile]:
    """Open a new file, which is on the disk when this ends without an error.

    Raises:
        FileExistsError: if there is one, or a link, wherever it leads.
    """
    with open(path, "xb", buffering=2**20) as file:
        yield NewDiskFile(file)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Make names in ``folder`` survive a crash of the machine, where its file system has a way to."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _FOLDERS_NOT_SYNCED:
            raise
    finally:
        os.close(descriptor)
