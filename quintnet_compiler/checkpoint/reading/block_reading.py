"""Blocks of tensors, read from pieces of a file that are compared with their hashes while they are read.

A piece of which a good part is wanted is read whole, as only then its hash can be compared. Of others only what is
wanted is read: they were compared before.

To read once, and still change nothing unless all is whole, takes memory for a second copy. For 1 GiB it took 0.65 s of
a processor's time to get (fresh pages), and reading again takes 0.2 s.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ...weights.safetensors_writer import bytes_of
from ..pieces import PIECE, FilePiece, Share, WindowReader, not_as_written, shared
from ..tensor_file import RowBlock

LEAST_WANTED = 4  # a piece is read whole if one in so many of its bytes is wanted
LEAST_IN_PLACE = 2**16  # bytes that are worth a call of their own, which saves a copy
MOST_REGIONS = 8  # of a file, each read by one thread


@dataclass(frozen=True)
class Region:
    """A run of a file's ``pieces``, and the ``blocks`` that begin in it, sorted. One thread reads them."""

    pieces: Sequence[FilePiece]
    blocks: Sequence[RowBlock]

    def read(self, reader: WindowReader) -> None:
        """Read the blocks, from the first byte to the last.

        Raises:
            Damaged: if a piece is not what was written. Blocks may have been filled with it.
        """
        sweep = _Sweep(self.blocks)
        for number, wanted in _wanted(self.blocks):
            piece = self.pieces[number]
            if sum(stop - start for start, stop in wanted) * LEAST_WANTED >= piece.size:
                if not reader.is_as_written(piece, sweep):
                    raise not_as_written(piece.name)
                continue
            for start, stop in wanted:
                reader.read(piece.file, start, stop, sweep)


def regions(pieces: Sequence[FilePiece], blocks: Iterable[RowBlock]) -> list[Region]:
    """Return ``blocks`` of the file that has ``pieces``, in regions of about the same number of pieces."""
    by_piece: dict[int, list[RowBlock]] = defaultdict(list)
    for block in sorted(blocks, key=lambda block: block.begins_at):
        if block.begins_at < block.ends_at:
            by_piece[block.begins_at // PIECE].append(block)
    numbers = sorted(by_piece)
    shares = (Share(number, MOST_REGIONS).share_of(numbers) for number in range(MOST_REGIONS))
    return [Region(pieces, [block for number in share for block in by_piece[number]]) for share in shares if share]


def read_regions(regions: Sequence[Region]) -> None:
    """Read all blocks, in threads.

    Raises:
        Damaged: as :meth:`Region.read` does.
    """

    def read(share: Sequence[Region]) -> None:
        reader = WindowReader()
        for region in share:
            region.read(reader)

    shared(read, regions)


def _wanted(blocks: Sequence[RowBlock]) -> Iterable[tuple[int, list[tuple[int, int]]]]:
    """Return the pieces that blocks, which are sorted, lie in, and the ranges of bytes that are wanted of each."""
    ranges: dict[int, list[tuple[int, int]]] = {}
    end = 0
    for block in blocks:
        start = max(block.begins_at, end)  # what another block wants, too, is read once
        while start < block.ends_at:
            stop = min(block.ends_at, (start // PIECE + 1) * PIECE)
            ranges.setdefault(start // PIECE, []).append((start, stop))
            start = stop
        end = max(end, block.ends_at)
    return ranges.items()


class _Sweep:
    """Blocks that are filled by windows of a file, which come in their order."""

    def __init__(self, blocks: Sequence[RowBlock]) -> None:
        self._waiting = deque(blocks)
        self._filling: list[_Filling] = []

    def room_at(self, offset: int, size: int) -> memoryview | None:
        """Return the block's own memory, if bytes go into one alone, and enough of them."""
        self._begin(offset + 1)
        if len(self._filling) != 1:
            return None
        stop = offset + size if not self._waiting else min(offset + size, self._waiting[0].begins_at)
        room = self._filling[0].room_at(offset, stop)
        return room if len(room) == size or len(room) >= LEAST_IN_PLACE else None

    def take_window(self, offset: int, window: memoryview) -> None:
        """Put a window's bytes into the blocks that want some of them."""
        stop, data = offset + len(window), np.frombuffer(window, np.uint8)
        self._begin(stop)
        for filling in self._filling:
            filling.copy_from(offset, data)
        self._filling = [filling for filling in self._filling if filling.stop > stop]

    def _begin(self, stop: int) -> None:
        """Fill those blocks, too, that begin before ``stop``."""
        while self._waiting and self._waiting[0].begins_at < stop:
            self._filling.append(_Filling(self._waiting.popleft()))


class _Filling:
    """A block of which not all bytes have come yet."""

    def __init__(self, block: RowBlock) -> None:
        self.block, self._room = block, block.room()
        self.start, self.stop = block.begins_at, block.ends_at
        self._bytes = _array(self._room)

    def room_at(self, offset: int, stop: int) -> memoryview:
        """Return the memory for bytes of the file."""
        return self._bytes[offset - self.start : stop - self.start].data

    def copy_from(self, offset: int, data: np.ndarray) -> None:
        """Copy what is wanted of ``data``, unless it was read to here; bring all to its place after the last of it."""
        start, stop = max(offset, self.start), min(offset + len(data), self.stop)
        wanted, room = data[start - offset : stop - offset], self.room_at(start, stop)
        if not np.may_share_memory(wanted, room):
            np.copyto(np.frombuffer(room, np.uint8), wanted)  # other threads run meanwhile
        if stop == self.stop:
            self.block.deliver(self._room)


def _array(x: Tensor) -> np.ndarray:
    return np.frombuffer(bytes_of(x), np.uint8)
