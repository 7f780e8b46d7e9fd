"""Which queries see which keys, by their positions: blocks of queries x keys that are seen wholly, up to their
diagonal, partly, or not at all."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Seen = Literal["all", "diagonal", "some"]
_WORD = re.compile(r"all|(causal)?(?:(?:^|_)window_([1-9]\d*))?(?:(?:^|_)chunk_([1-9]\d*))?")
FEWEST = 256  # queries of a strip where a window is shorter: fewer leave a device idle


@dataclass(frozen=True)
class Block:
    """``rows`` queries from position ``row`` on, and ``cols`` keys from position ``col`` on."""

    row: int
    rows: int
    col: int
    cols: int

    @property
    def ends(self) -> tuple[int, int]:
        """Return the positions after the last query, and after the last key."""
        return self.row + self.rows, self.col + self.cols

    def slices_of(self, part: Block) -> tuple[slice, slice]:
        """Return the slices of this block's queries and keys that are those of ``part``.

        >>> Block(4, 4, 0, 8).slices_of(Block(6, 2, 0, 4))
        (slice(2, 4, None), slice(0, 4, None))
        """
        row, col = part.row - self.row, part.col - self.col
        return slice(row, row + part.rows), slice(col, col + part.cols)


@dataclass(frozen=True)
class AttentionSpan:
    """Queries and keys of a block, as kernels with windows take them: of n queries and m keys, query i sees the key j
    if ``-left <= j - i - (m - n) <= right``, so that both are counted from the last ones; -1: no condition."""

    block: Block
    left: int = -1
    right: int = -1


@dataclass(frozen=True)
class Sight:
    """A query at position i sees the key at j if: j <= i (``causal``); i - j < ``window``; both are in one of the
    chunks of so many positions into which ``chunk`` cuts them (each where it is not 0)."""

    causal: bool = False
    window: int = 0
    chunk: int = 0

    @classmethod
    def parse(cls, text: str) -> Sight:
        """Parse the mask of an operator: "causal", "window_N" and "chunk_N", in this order; "all": no condition.

        Raises:
            ValueError: for any other word.

        >>> Sight.parse("causal_chunk_8"), str(Sight(True, 4)), str(Sight())
        (Sight(causal=True, window=0, chunk=8), 'causal_window_4', 'all')
        """
        match = _WORD.fullmatch(text)
        if not text or match is None:
            raise ValueError(
                f"{text!r} is no mask: say 'all', 'causal', 'window_4', 'chunk_8' or 'causal_window_4_chunk_8'"
            )
        return cls(bool(match[1]), int(match[2] or 0), int(match[3] or 0))

    def __str__(self) -> str:
        sizes = [f"{name}_{size}" for name, size in (("window", self.window), ("chunk", self.chunk)) if size]
        return "_".join([*(["causal"] if self.causal else []), *sizes]) or "all"

    def within(self, length: int) -> Sight:
        """Return the same mask of ``length`` positions, without a window or chunk that holds all of them."""
        window, chunk = (size if size < length else 0 for size in (self.window, self.chunk))
        return Sight(self.causal, window, chunk)

    def seen(self, block: Block) -> Seen | None:
        """Return how much of a block is seen: ``all``, up to its ``diagonal``, or ``some``; None: nothing.

        >>> [Sight(True, 0).seen(Block(4, 4, col, 4)) for col in (0, 4, 5, 8)]
        ['all', 'diagonal', 'some', None]
        """
        row_end, col_end = block.ends
        smallest, largest = block.row - (col_end - 1), row_end - 1 - block.col  # of i - j
        if (self.causal and largest < 0) or (self.window and smallest >= self.window):
            return None
        if self.chunk:
            rows, cols = self._chunks(block.row, row_end), self._chunks(block.col, col_end)
            if min(rows.stop, cols.stop) <= max(rows.start, cols.start):
                return None
            if len(rows) > 1 or len(cols) > 1:
                return "some"
        if self.window and largest >= self.window:
            return "some"
        if not self.causal or smallest >= 0:
            return "all"
        return "diagonal" if (block.row, block.rows) == (block.col, block.cols) else "some"

    def _chunks(self, first: int, end: int) -> range:
        """Return the chunks of the positions from ``first`` up to ``end``."""
        return range(first // self.chunk, (end - 1) // self.chunk + 1)

    def spans(self, block: Block) -> Iterator[AttentionSpan]:
        """Yield of each chunk in a block the queries that see any of its keys, and the keys that any of them sees.

        >>> list(Sight(True, 0).spans(Block(4, 4, 0, 6)))
        [AttentionSpan(block=Block(row=4, rows=4, col=0, cols=6), left=-1, right=2)]
        >>> [(x.block, x.left) for x in Sight(True, 3).spans(Block(4, 8, 0, 6))]
        [(Block(row=4, rows=4, col=2, cols=4), 0)]
        """
        (row_end, col_end), size = block.ends, self.chunk or max(block.ends)
        for begin in range(block.row // size * size, row_end, size):
            row, end = max(block.row, begin), min(row_end, begin + size)
            col, last = max(block.col, begin if self.chunk else 0), min(col_end, begin + size)
            if self.causal:
                row, last = max(row, col), min(last, end)
            if self.window:
                end = min(end, last + self.window - 1)
                col, last = max(col, row - self.window + 1), min(last, end) if self.causal else last
            if row < end and col < last:
                ahead = end - last  # of the last query, from the last key
                left = self.window - 1 - ahead if self.window and end - 1 - col >= self.window else -1
                right = ahead if self.causal and (last - 1 > row or not ahead) else -1
                yield AttentionSpan(Block(row, end - row, col, last - col), left, right)

    def parts(self, block: Block, cells: int, tiled: bool) -> Iterator[tuple[Block, Seen]]:
        """Yield what is seen of a block, as blocks that do not overlap.

        One that is seen partly is a tile of at most ``cells`` scores (or of one). ``tiled``: so is every other one.

        >>> [(b.row, b.col, b.cols, seen) for b, seen in Sight(True, 0).parts(Block(4, 4, 0, 12), 16, tiled=False)]
        [(4, 0, 4, 'all'), (4, 4, 4, 'diagonal')]
        """
        for strip in self._strips(block, cells, tiled):
            for part in self._cut(strip, tiled):
                seen = self.seen(part)
                if seen is None:
                    continue
                width = max(1, cells // part.rows) if tiled or seen == "some" else part.cols
                for col in range(part.col, part.ends[1], width):
                    tile = Block(part.row, part.rows, col, min(width, part.ends[1] - col))
                    if (tile_seen := self.seen(tile)) is not None:
                        yield tile, tile_seen

    def _strips(self, block: Block, cells: int, tiled: bool) -> Iterator[Block]:
        """Cut a block by rows into those whose keys are seen alike, or few."""
        if tiled or self.window:
            most = max(1, math.isqrt(cells))
            step = most if tiled else min(most, max(self.window, FEWEST))
            cuts = [*range(block.row, block.ends[0], step)]
        else:  # those of the diagonal, and those before and behind it
            cuts = [block.col, block.ends[1]] if self.causal else []
        if self.chunk:  # several short ones at once
            step = self.chunk * max(1, min(FEWEST, math.isqrt(cells)) // self.chunk)
            cuts += range(block.row // step * step, block.ends[0], step)
        for row, end in _ranges(block.row, block.ends[0], cuts):
            yield Block(row, end - row, block.col, block.cols)

    def _cut(self, strip: Block, tiled: bool) -> Iterator[Block]:
        """Cut a strip by columns, without those that no row sees; those that all rows see are one block."""
        (row_end, col_end), first = strip.ends, strip.col
        if self.window:
            first = max(first, strip.row - self.window + 1)
        if self.causal:
            col_end = min(col_end, row_end)
        if self.chunk:
            first = max(first, strip.row // self.chunk * self.chunk)
            col_end = min(col_end, -(-row_end // self.chunk) * self.chunk)
        cuts = []
        if not tiled and not (self.window and self.window < strip.rows):
            cuts = [strip.row] if self.causal else []
            cuts += [row_end - self.window] if self.window else []
        for col, end in _ranges(first, col_end, cuts):
            yield Block(strip.row, strip.rows, col, end - col)


def _ranges(first: int, end: int, cuts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield where each of the parts begins and ends into which ``cuts`` cut a range."""
    if first < end:
        yield from pairwise(sorted({first, end, *(at for at in cuts if first < at < end)}))
