"""Files on a disk: written so that they survive a crash of the machine, and read by several threads."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO


class DiskFile:
    """A file to read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self._file).st_size

    def read_into(self, offset: int, into: memoryview) -> None:
        while len(into):
            got = os.preadv(self._file, [into], offset)
            if not got:
                raise OSError(f"{self._path.name} ends at byte {offset}")
            offset, into = offset + got, into[got:]

    def __enter__(self) -> DiskFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)


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
    """A new file, which is on the disk when this ends without an error.

    Raises:
        FileExistsError: if there is one.
    """
    with open(path, "xb", buffering=2**20) as file:
        yield NewDiskFile(file)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Make names in ``folder`` survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
