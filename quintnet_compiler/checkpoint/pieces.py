"""Files in pieces of a fixed size, each with a hash of its own. Threads hash pieces while others are written or read,
and a file that one rank wrote can be checked by all.

The hash is XXH3 with 128 bits (https://xxhash.com): it finds damage, as fast as memory is read. Whoever can write files
can write their hashes, too, so a cryptographic one would find no more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import xxhash

PIECE = 4 * 2**20  # bytes: what a core's cache may still hold when it is hashed
_AHEAD = 8  # pieces that are written but not hashed yet, at most: each may be a copy
_THREADS = 8
T = TypeVar("T")


@dataclass(frozen=True)
class Digest:
    """Of a file: its bytes, and the hash of each piece."""

    size: int
    pieces: tuple[str, ...]


class FileSink(Protocol):
    """A file that is written from its beginning to its end."""

    def write(self, piece: Sequence[memoryview], /) -> None: ...


class FileSource(Protocol):
    """A file that threads read anywhere, several at a time."""

    @property
    def size(self) -> int: ...

    def read_into(self, offset: int, into: memoryview, /) -> None:
        """Fill ``into`` with what begins at ``offset``. Raises: OSError if the file ends before."""


def threads() -> ThreadPoolExecutor:
    """As many as this process has cores, few at most: they wait for the disk, too."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return ThreadPoolExecutor(min(cores, _THREADS), "quintnet-checkpoint")


def write(sink: FileSink, buffers: Iterable[memoryview]) -> Digest:
    """Write ``buffers`` one after the other, and hash them meanwhile."""
    size, hashes = 0, list[Future[str]]()
    with threads() as pool:
        for piece in cut(buffers):
            if len(hashes) >= _AHEAD:
                hashes[-_AHEAD].result()
            hashes.append(pool.submit(_hash, piece))
            sink.write(piece)
            size += sum(map(len, piece))
    return Digest(size, tuple(one.result() for one in hashes))


@dataclass(frozen=True)
class FilePiece:
    """One of file ``name``, which had this hash when it was written."""

    name: str
    file: FileSource
    start: int
    size: int
    hash: str


def pieces_of(name: str, file: FileSource, written: Digest) -> list[FilePiece]:
    return [
        FilePiece(name, file, number * PIECE, min(PIECE, written.size - number * PIECE), known)
        for number, known in enumerate(written.pieces)
    ]


def different(pieces: Sequence[FilePiece]) -> str | None:
    """Read pieces. The name of a file of which one is not what was written, or None."""
    found: list[str] = []

    def check(share: Sequence[FilePiece]) -> None:
        room = memoryview(bytearray(PIECE))
        for piece in share:
            if found:
                return
            into = room[: piece.size]
            piece.file.read_into(piece.start, into)
            if _hash([into]) != piece.hash:
                found.append(piece.name)

    shared(check, pieces)
    return found[0] if found else None


def shared(work: Callable[[Sequence[T]], object], items: Sequence[T]) -> None:
    """Call ``work`` with parts of ``items``, each in a thread of its own."""
    with threads() as pool:
        parts = [items[first::_THREADS] for first in range(_THREADS)]
        for one in [pool.submit(work, part) for part in parts if part]:
            one.result()


def cut(buffers: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """``buffers``, joined and cut in pieces: the last may be shorter. A piece is made of parts of them."""
    piece, room = list[memoryview](), PIECE
    for buffer in buffers:
        rest = buffer
        while len(rest):
            part, rest = rest[:room], rest[room:]
            piece.append(part)
            room -= len(part)
            if not room:
                yield piece
                piece, room = [], PIECE
    if piece:
        yield piece


def _hash(piece: Iterable[memoryview]) -> str:
    found = xxhash.xxh3_128()
    for part in piece:
        found.update(part)
    return found.hexdigest()
