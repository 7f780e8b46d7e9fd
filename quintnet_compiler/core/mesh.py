"""A mesh: named axes over ranks. The first axis is the outermost: its neighbours are furthest apart."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from .axes import AXES, DATA_AXES
from .errors import CompileError
from .html import table

MOST_SHOWN = 64  # rows and columns in a notebook


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
        for name, size in axes.items():
            if name not in AXES:
                raise CompileError("QN201", f"unknown axis {name!r}", fix=f"use some of {', '.join(AXES)}")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise CompileError(
                    "QN201", f"axis {name} has size {size!r}", fix="give each axis a whole number of ranks, 1 or more"
                )
        object.__setattr__(self, "axes", tuple(axes.items()))

    def __getitem__(self, axis: str) -> int:
        """The size of ``axis``; 1 where the mesh does not have it."""
        return self._sizes.get(axis, 1)

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{name}={size}' for name, size in self.axes)})"

    def _repr_html_(self) -> str:
        *outer, (inner, count) = self.axes or (("rank", 1),)
        head = [name for name, _ in outer] + [f"{inner}={index}" for index in range(min(count, MOST_SHOWN))]
        places = list(itertools.islice(itertools.product(*(range(size) for _, size in outer)), MOST_SHOWN))
        rows = [
            [*place, *(f"rank {number * count + index}" for index in range(min(count, MOST_SHOWN)))]
            for number, place in enumerate(places)
        ]
        return table(head, rows, f"{self!r}: {self.size} ranks")

    @cached_property
    def _sizes(self) -> dict[str, int]:
        return dict(self.axes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the axes, outermost first."""
        return tuple(name for name, _ in self.axes)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the axes, outermost first."""
        return tuple(size for _, size in self.axes)

    @cached_property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.shape)

    @cached_property
    def data_ways(self) -> int:
        """The number of parts into which ranks split a batch: along ``dp``, and along ``ep``, whose ranks have
        different rows, too."""
        return math.prod(self[axis] for axis in DATA_AXES)

    def data_rank(self, rank: int) -> int:
        """The number, below :attr:`data_ways`, of the rows that ``rank`` has."""
        place = self.coordinate(rank)
        number = 0
        for axis in DATA_AXES:
            number = number * self[axis] + place.get(axis, 0)
        return number

    def coordinate(self, rank: int) -> dict[str, int]:
        """Where ``rank`` stands on every axis."""
        place: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, place[name] = divmod(rank, size)
        return {name: place[name] for name in self.names}

    def rank(self, coordinate: dict[str, int]) -> int:
        """The rank at ``coordinate``; axes that it leaves out count as 0."""
        number = 0
        for name, size in self.axes:
            number = number * size + coordinate.get(name, 0)
        return number

    def peers(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """The ranks that differ from ``rank`` at most along ``axes``, in order of their coordinates."""
        here, stride = self.coordinate(rank), 1
        strides: dict[str, int] = {}
        for name, size in reversed(self.axes):
            strides[name], stride = stride, stride * size
        present = [name for name in self.names if name in axes]
        found = [rank - sum(here[name] * strides[name] for name in present)]
        for name in present:
            found = [first + place * strides[name] for first in found for place in range(self[name])]
        return tuple(found)
