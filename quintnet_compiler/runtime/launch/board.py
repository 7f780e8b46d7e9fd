"""Which call each rank of this machine is in: memory that all of them see, and that outlives them."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from zlib import crc32

from ...core.errors import RunError

NAME = "ranks.calls"
KEPT = 16  # calls of each rank that are remembered, by the remainder of their number
WORDS = 1 + KEPT  # of 8 bytes, for each rank: its training step and 1, and its last calls


class Board:
    """Every rank writes its own words before a call, and then reads the others': of two ranks that go into different
    calls, the later one sees it, before a message of either reaches the other."""

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        """``folder``: the same one for all ranks of this machine, and of this attempt alone.

        Raises:
            RunError: QN307 if its disk is full, or it cannot be written.
        """
        try:
            file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise _no_room(folder, error) from error
        try:
            _reserve(file, size * WORDS * 8)
            # 8 bytes at a time: nobody reads half a word
            self.words = memoryview(mmap.mmap(file, size * WORDS * 8)).cast("q")
        except OSError as error:
            raise _no_room(folder, error) from error
        finally:
            os.close(file)
        self.first = rank * WORDS
        self.words[self.first] = 0

    def enter(self, number: int, kind: str, step: int) -> bool:
        """This rank goes into its call ``number``. Whether another rank went into one of another kind."""
        words, place = self.words, 1 + number % KEPT
        mine = number << 32 | crc32(kind.encode())
        words[self.first], words[self.first + place] = step + 1, mine
        return any(other != mine and other >> 32 == number for other in words[place::WORDS].tolist())


def _reserve(file: int, size: int) -> None:
    """Give a file this size, and room for it: a page of a mapped file for which there is none ends the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


def _no_room(folder: Path, error: OSError) -> RunError:
    return RunError(
        "QN307",
        f"{folder}, where ranks of this machine tell each other what they do, cannot be written: {error.strerror}",
        fix="free space there, or set TMPDIR to another folder",
    )


def last_step(folder: Path, rank: int) -> int:
    """The training step that a rank of this machine began last; -1 before the first, and of one that never started."""
    try:
        word = (folder / NAME).read_bytes()[rank * WORDS * 8 :][:8]
    except OSError:
        return -1
    return memoryview(word.ljust(8, b"\0")).cast("q")[0] - 1
