"""Files in pieces of a fixed size, each with a hash of its own. Threads hash pieces while others are written or read,
and a file that one rank wrote can be checked by all.

The hash is XXH3 with 128 bits (https://xxhash.com): it finds damage, as fast as memory is read. Whoever can write files
can write their hashes, too, so a cryptographic one would find no more.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import xxhash

from ..runtime.threads.room import has_room
from ..weights.files import shown
from .reading.open_files import Damaged

PIECE = 4 * 2**20  # bytes: what a core's cache may still hold when it is hashed
_AHEAD = 8  # pieces that are written but not hashed yet, at most: each may be a copy
_THREADS = 8
A = TypeVar("A")
T = TypeVar("T")


@dataclass(frozen=True)
class Digest:
    """A file's size in bytes, and the hash of each piece."""

    size: int
    pieces: tuple[str, ...]


@dataclass(frozen=True)
class Share:
    """One of so many ``shares``."""

    number: int = 0
    shares: int = 1

    def share_of(self, items: Sequence[T]) -> Sequence[T]:
        """Return this share of ``items``: a run of them, as what follows on a disk is read faster."""
        first, last = (len(items) * number // self.shares for number in (self.number, self.number + 1))
        return items[first:last]


class FileSink(Protocol):
    """A file that is written from its beginning to its end."""

    def write(self, piece: Sequence[memoryview], /) -> None:
        """Append a piece, which is made of parts."""


class FileSource(Protocol):
    """A file that threads read anywhere, several at a time."""

    @property
    def size(self) -> int:
        """Return how many bytes it has."""

    @property
    def bytes_at_once(self) -> int:
        """Return how many bytes are best read by one call."""

    def read_into(self, offset: int, into: memoryview, /) -> None:
        """Fill ``into`` with what begins at ``offset``. Raises: OSError if the file ends before."""


def threads() -> ThreadPoolExecutor:
    """As many as this process has cores, few at most: they wait for the disk, too. None where there is no room."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = min(cores, _THREADS)
    pool = ThreadPoolExecutor(count, "quintnet-checkpoint")
    if not has_room(count):
        pool.shutdown()  # whoever submits work does it then: submit_or_run
    return pool


def submit_or_run(pool: ThreadPoolExecutor, work: Callable[[A], T], argument: A) -> Future[T]:
    """Have a thread do ``work``, or do it here where the pool was shut down, as all are when the interpreter ends."""
    try:
        return pool.submit(work, argument)
    except RuntimeError:
        done: Future[T] = Future()
    try:
        done.set_result(work(argument))
    except Exception as error:
        done.set_exception(error)
    return done


def write(sink: FileSink, buffers: Iterable[memoryview]) -> Digest:
    """Write ``buffers`` one after the other, and hash them meanwhile."""
    size, hashes = 0, list[Future[str]]()
    with threads() as pool:
        for piece in cut(buffers):
            if len(hashes) >= _AHEAD:
                hashes[-_AHEAD].result()
            hashes.append(submit_or_run(pool, _hash, piece))
            sink.write(piece)
            size += sum(map(len, piece))
    return Digest(size, tuple(future.result() for future in hashes))


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
        FilePiece(name, file, number * PIECE, min(PIECE, written.size - number * PIECE), piece_hash)
        for number, piece_hash in enumerate(written.pieces)
    ]


class WindowSink(Protocol):
    """Takes what is read of a file, window by window."""

    def room_at(self, offset: int, size: int, /) -> memoryview | None:
        """Return where to read what begins at ``offset`` to, at most ``size`` bytes; None: anywhere."""

    def take_window(self, offset: int, window: memoryview, /) -> object:
        """Use what begins at ``offset``. If it was read elsewhere, the next window overwrites it."""


class _Nobody:
    def room_at(self, offset: int, size: int) -> None:
        """Have no place for it."""

    def take_window(self, offset: int, window: memoryview) -> None:
        """Leave it."""


@dataclass(frozen=True)
class _KeptBytes:
    """Has what begins at ``start`` read to where it is kept."""

    data: memoryview
    start: int

    def room_at(self, offset: int, size: int) -> memoryview:
        return self.data[offset - self.start :][:size]

    def take_window(self, offset: int, window: memoryview) -> None:
        """Leave it: it lies where it is kept."""


class WindowReader:
    """Reads bytes of files, as many at once as is best. This is for one thread, which keeps memory for a window."""

    def __init__(self) -> None:
        self._spare = memoryview(b"")

    def is_as_written(self, piece: FilePiece, sink: WindowSink | None = None) -> bool:
        """Read a piece, and return whether its hash is the one that it had when it was written."""
        digest = xxhash.xxh3_128()
        self.read(piece.file, piece.start, piece.start + piece.size, sink or _Nobody(), digest)
        return digest.hexdigest() == piece.hash

    def read(
        self, file: FileSource, start: int, stop: int, sink: WindowSink, digest: xxhash.xxh3_128 | None = None
    ) -> None:
        """Read bytes of a file for ``sink``; ``digest`` gets them, too, while they are in the cache of a core."""
        size, read_into = file.bytes_at_once, file.read_into
        while start < stop:
            room = sink.room_at(start, stop - start) or self._spare_room(size)[: stop - start]
            for first in range(0, len(room), size):
                window = room[first : first + size]
                read_into(start + first, window)
                if digest is not None:
                    digest.update(window)
            sink.take_window(start, room)
            start += len(room)

    def _spare_room(self, size: int) -> memoryview:
        if len(self._spare) != size:
            self._spare = memoryview(bytearray(size))
        return self._spare


def not_as_written(name: str) -> Damaged:
    """Return the error of a file that has other bytes than were written."""
    return Damaged(f"{shown(name)} is not what was written: its hash is another")


class VerifiedSource:
    """A file of which whole pieces are read and compared with their hashes, whatever part of them is wanted.

    The last one is kept: this is for one thread, which reads on.
    """

    def __init__(self, file: FileSource, pieces: Sequence[FilePiece]) -> None:
        self.size, self.bytes_at_once = file.size, file.bytes_at_once
        self._pieces, self._kept, self._data = pieces, -1, memoryview(b"")
        self._reader = WindowReader()

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` with what begins at ``offset``.

        Raises:
            Damaged: if a piece has another hash.
        """
        while len(into):
            number, start = divmod(offset, PIECE)
            part = self._piece(number)[start : start + len(into)]
            into[: len(part)] = part
            offset, into = offset + len(part), into[len(part) :]

    def _piece(self, number: int) -> memoryview:
        if number != self._kept:
            piece = self._pieces[number]
            data = memoryview(bytearray(piece.size))
            if not self._reader.is_as_written(piece, _KeptBytes(data, piece.start)):
                raise not_as_written(piece.name)
            self._kept, self._data = number, data
        return self._data


def compared(pieces: Sequence[FilePiece]) -> AbstractContextManager[None]:
    """Read pieces, and compare their hashes, while a ``with`` block runs.

    Raises:
        Damaged: at the end of the block, instead of what that raised: naming a file of which a piece is not what was
            written.
    """
    damage: list[Damaged] = []

    def compare(share: Sequence[FilePiece]) -> None:
        reader = WindowReader()
        for piece in share:
            if damage:
                return
            if not reader.is_as_written(piece):
                damage.append(not_as_written(piece.name))
                raise damage[0]

    return in_threads(compare, pieces)


def shared(work: Callable[[Sequence[T]], object], items: Sequence[T]) -> None:
    """Call ``work`` with shares of ``items``, each in a thread of its own."""
    with in_threads(work, items):
        pass


@contextlib.contextmanager
def in_threads(work: Callable[[Sequence[T]], object], items: Sequence[T]) -> Iterator[None]:
    """Call ``work`` with shares of ``items`` in threads, while a ``with`` block runs.

    An error of a thread is raised instead of one of the block.
    """
    with threads() as pool:
        parts = [Share(number, _THREADS).share_of(items) for number in range(_THREADS)]
        running = [submit_or_run(pool, work, part) for part in parts if part]
        try:
            yield
        finally:
            for each in running:
                each.result()


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
    digest = xxhash.xxh3_128()
    for part in piece:
        digest.update(part)
    return digest.hexdigest()
