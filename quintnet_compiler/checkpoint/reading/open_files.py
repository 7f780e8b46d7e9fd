"""A checkpoint that is open: its files stay those that it had when it was opened.

Others may move, replace or remove it meanwhile. What is no longer to be had is said, and never mixed with what took its
place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ...weights.files import shown


class Damaged(Exception):
    """Say why a checkpoint cannot be used: files are missing, or have other bytes than were written."""


class OtherFormatError(Exception):
    """Say which format a checkpoint has, if it is not one that this program reads. It may be whole."""


class VanishedError(Exception):
    """Say what of an open checkpoint was removed or changed since it was opened."""


class FileStamp(NamedTuple):
    """A file as a folder lists it.

    Attributes:
        size: bytes; None for what is not a plain file.
        version: changes when the file is written again.
    """

    size: int | None
    version: str


@dataclass(frozen=True)
class OpenFiles:
    """The files of one checkpoint, as they were when it was opened.

    Attributes:
        path: the folder's path, or its URL.
        stamps: its files.
        read: fills memory with what begins at an offset of a file. Raises: VanishedError, or OSError naming the file.
        replaced: returns whether the checkpoint's name stands for other files now, or for none.
        changed: returns those of some files that have another size or version now.
        bytes_at_once: how many are best read by one call.
    """

    path: Path | str
    stamps: Mapping[str, FileStamp]
    read: Callable[[str, int, memoryview], None]
    replaced: Callable[[], bool]
    changed: Callable[[Collection[str]], Collection[str]]
    bytes_at_once: int

    def file(self, name: str) -> OpenFile:
        """Return a file to read.

        Raises:
            Damaged: if there is no such plain file.
        """
        if name not in self.stamps:
            raise Damaged(f"{shown(name)} is missing")
        size = self.stamps[name].size
        if size is None:
            raise Damaged(f"{shown(name)} is not a plain file")
        return OpenFile(self, name, size)

    def require_unchanged(self) -> None:
        """Raise VanishedError if a file is no longer what it was when the checkpoint was opened."""
        for name in sorted(self.changed(self.stamps.keys())):
            raise VanishedError(f"{shown(name)} has another size or version than when it was opened")


@dataclass(frozen=True)
class OpenFile:
    """A file of an open checkpoint, which threads read anywhere, several at a time."""

    files: OpenFiles
    name: str
    size: int

    @property
    def bytes_at_once(self) -> int:
        """Return how many bytes are best read by one call."""
        return self.files.bytes_at_once

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` with what begins at ``offset``.

        Raises:
            VanishedError: if the file is no longer what it was.
            OSError: naming the file.
        """
        self.files.read(self.name, offset, into)
