"""A mesh: named axes over ranks.

The first axis is the outermost: its neighbours are furthest apart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from .axes import AXES, DATA_AXES
from .errors import CompileError
from .html import table

MAX_TABLE_CELLS = 64  # rows, and columns, of a mesh in a notebook


@dataclass(frozen=True, init=False)
class Mesh:
    """Ranks arranged along named axes, outermost first: ``Mesh(pp=2, dp=2, tp=2)`` has 8 ranks.

    Axes: ``dp`` data, ``tp`` tensor, ``cp`` context, ``ep`` expert, ``pp`` pipeline; any subset, any order.
    Ranks are numbered row-major, so ranks along the last axis are neighbours.

    Raises:
        CompileError: QN201 for an unknown axis or a size that is not a positive integer.

    >>> Mesh(pp=2, tp=2).coordinate(2)
    {'pp': 1, 'tp': 0}
    """

    axes: tuple[tuple[str, int], ...]

    def __init__(self, /, **axes: int) -> None:
        """Check the names and sizes of ``axes``."""
        for name, size in axes.items():
            if name not in AXES:
                raise CompileError("QN201", f"unknown axis {name!r}", fix=f"use some of {', '.join(AXES)}")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise CompileError(
                    "QN201", f"axis {name} has size {size!r}", fix="give each axis a whole number of ranks, 1 or more"
                )
        object.__setattr__(self, "axes", tuple(axes.items()))

    def __getitem__(self, axis: str) -> int:
        """Return the size of ``axis``; 1 where the mesh does not have it."""
        return self._sizes.get(axis, 1)

    def __repr__(self) -> str:
        """Return the call that builds the mesh."""
        return f"Mesh({', '.join(f'{name}={size}' for name, size in self.axes)})"

    def _repr_html_(self) -> str:
        *outer, (inner, count) = self.axes or (("rank", 1),)
        head = [name for name, _ in outer] + [f"{inner}={index}" for index in range(min(count, MAX_TABLE_CELLS))]
        outer_coordinates = itertools.product(*(range(size) for _, size in outer))
        rows = [
            [*coordinate, *(f"rank {row * count + index}" for index in range(min(count, MAX_TABLE_CELLS)))]
            for row, coordinate in enumerate(itertools.islice(outer_coordinates, MAX_TABLE_CELLS))
        ]
        return table(head, rows, f"{self!r}: {self.size} ranks")

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return dict(self.axes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the names of the axes, outermost first."""
        return tuple(name for name, _ in self.axes)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Return the sizes of the axes, outermost first."""
        return tuple(size for _, size in self.axes)

    @cached_property
    def size(self) -> int:
        """Return the number of ranks."""
        return math.prod(self.shape)

    @cached_property
    def data_ways(self) -> int:
        """Return the number of parts into which a batch is split: along ``dp``, and along ``ep``."""
        return math.prod(self[axis] for axis in DATA_AXES)

    def data_rank(self, rank: int) -> int:
        """Return the index, below :attr:`data_ways`, of the part of the batch that ``rank`` reads."""
        coordinate = self.coordinate(rank)
        index = 0
        for axis in DATA_AXES:
            index = index * self[axis] + coordinate.get(axis, 0)
        return index

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the index of ``rank`` on every axis."""
        indices: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, indices[name] = divmod(rank, size)
        return {name: indices[name] for name in self.names}

    def rank(self, coordinate: dict[str, int]) -> int:
        """Return the rank at ``coordinate``; axes that it leaves out count as 0."""
        number = 0
        for name, size in self.axes:
            number = number * size + coordinate.get(name, 0)
        return number

    def peers(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` at most along ``axes``, in order of their coordinates."""
        coordinate, stride = self.coordinate(rank), 1
        strides: dict[str, int] = {}
        for name, size in reversed(self.axes):
            strides[name], stride = stride, stride * size
        varied = [name for name in self.names if name in axes]
        peers = [rank - sum(coordinate[name] * strides[name] for name in varied)]
        for name in varied:
            peers = [first + index * strides[name] for first in peers for index in range(self[name])]
        return tuple(peers)
