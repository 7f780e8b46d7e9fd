"""Which queries see which keys, by their positions: blocks of queries x keys that are seen wholly, up to their
diagonal, partly, or not at all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Seen = Literal["all", "diagonal", "some"]
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
        """The positions behind the last query, and behind the last key."""
        return self.row + self.rows, self.col + self.cols

    def places(self, part: Block) -> tuple[slice, slice]:
        """Where the queries and the keys of ``part`` lie among those of this block.

        >>> Block(4, 4, 0, 8).places(Block(6, 2, 0, 4))
        (slice(2, 4, None), slice(0, 4, None))
        """
        row, col = part.row - self.row, part.col - self.col
        return slice(row, row + part.rows), slice(col, col + part.cols)


@dataclass(frozen=True)
class Sight:
    """A query at position i sees the key at j if: j <= i (``causal``); i - j < ``window`` (where that is not 0)."""

    causal: bool
    window: int

    def seen(self, block: Block) -> Seen | None:
        """How much of a block is seen: ``all`` of it, up to its ``diagonal``, or ``some``; None: nothing.

        >>> [Sight(True, 0).seen(Block(4, 4, col, 4)) for col in (0, 4, 5, 8)]
        ['all', 'diagonal', 'some', None]
        """
        row_end, col_end = block.ends
        least, most = block.row - (col_end - 1), row_end - 1 - block.col  # of i - j
        if (self.causal and most < 0) or (self.window and least >= self.window):
            return None
        if self.window and most >= self.window:
            return "some"
        if not self.causal or least >= 0:
            return "all"
        return "diagonal" if (block.row, block.rows) == (block.col, block.cols) else "some"

    def parts(self, block: Block, cells: int, tiled: bool) -> Iterator[tuple[Block, Seen]]:
        """What is seen of a block, as blocks that do not overlap. One that is seen partly is a tile of at most
        ``cells`` scores (or of one). ``tiled``: so is every other one.

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
                    if (found := self.seen(tile)) is not None:
                        yield tile, found

    def _strips(self, block: Block, cells: int, tiled: bool) -> Iterator[Block]:
        """By rows: those whose keys are seen alike, or few."""
        if tiled or self.window:
            most = max(1, math.isqrt(cells))
            step = most if tiled else min(most, max(self.window, FEWEST))
            cuts = [*range(block.row, block.ends[0], step)]
        else:  # those of the diagonal, and those before and behind it
            cuts = [block.col, block.ends[1]] if self.causal else []
        for row, end in _ranges(block.row, block.ends[0], cuts):
            yield Block(row, end - row, block.col, block.cols)

    def _cut(self, strip: Block, tiled: bool) -> Iterator[Block]:
        """By columns: without those that no row sees; those that all rows see are one block."""
        (row_end, col_end), first = strip.ends, strip.col
        if self.window:
            first = max(first, strip.row - self.window + 1)
        if self.causal:
            col_end = min(col_end, row_end)
        cuts = []
        if not tiled and not (self.window and self.window < strip.rows):
            cuts = [strip.row] if self.causal else []
            cuts += [row_end - self.window] if self.window else []
        for col, end in _ranges(first, col_end, cuts):
            yield Block(strip.row, strip.rows, col, end - col)


def _ranges(first: int, end: int, cuts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The parts into which ``cuts`` cut a range: where each begins and ends."""
    if first < end:
        yield from pairwise(sorted({first, end, *(at for at in cuts if first < at < end)}))
