"""Where the values of a tensor come from: tensors in files, stacked, joined, cut or transposed, of which any part can
be read without the rest."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Runs = tuple[tuple[int, int], ...]  # the indices of one dim, as (start, stop) in order


class Source(Protocol):
    """A tensor whose parts can be read into memory."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, runs: Sequence[Runs], out: Tensor) -> None:
        """Copy the part that ``runs`` tells (for each dim) into ``out``, which has its shape."""
        ...


def runs_of(positions: Tensor) -> Runs:
    """Increasing indices as runs.

    >>> runs_of(torch.tensor([0, 1, 4, 5, 6]))
    ((0, 2), (4, 7))
    """
    if not len(positions):
        return ()
    (breaks,) = torch.nonzero(positions.diff() != 1, as_tuple=True)
    ends = [*breaks.tolist(), len(positions) - 1]
    starts = [0, *(end + 1 for end in ends[:-1])]
    return tuple((int(positions[a]), int(positions[b]) + 1) for a, b in zip(starts, ends, strict=True))


def _placed(runs: Runs) -> Iterator[tuple[int, int, int]]:
    """Each run with the place in the part at which it begins."""
    at = 0
    for start, stop in runs:
        yield start, stop, at
        at += stop - start


@dataclass(frozen=True)
class Stored:
    """A tensor in a file. ``load(slices)`` reads one block of it."""

    file: str
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[tuple[slice, ...]], Tensor]

    def read(self, runs: Sequence[Runs], out: Tensor) -> None:
        for block in itertools.product(*(list(_placed(r)) for r in runs)):
            target = out[tuple(slice(at, at + stop - start) for start, stop, at in block)]
            target.copy_(self.load(tuple(slice(start, stop) for start, stop, _ in block)))

    def __str__(self) -> str:
        return f"{self.name} in {self.file}"


@dataclass(frozen=True)
class Stack:
    """Tensors of one shape along a new dim."""

    dim: int
    sources: tuple[Source, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        inner = self.sources[0].shape
        return (*inner[: self.dim], len(self.sources), *inner[self.dim :])

    @property
    def dtype(self) -> torch.dtype:
        return self.sources[0].dtype

    def read(self, runs: Sequence[Runs], out: Tensor) -> None:
        rest = [r for dim, r in enumerate(runs) if dim != self.dim]
        for start, stop, at in _placed(runs[self.dim]):
            for index in range(start, stop):
                self.sources[index].read(rest, out.select(self.dim, at + index - start))

    def __str__(self) -> str:
        return f"{self.sources[0]}, ... ({len(self.sources)} tensors)"


@dataclass(frozen=True)
class Join:
    """Tensors one after another along a dim that they have."""

    dim: int
    sources: tuple[Source, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = list(self.sources[0].shape)
        sizes[self.dim] = sum(source.shape[self.dim] for source in self.sources)
        return tuple(sizes)

    @property
    def dtype(self) -> torch.dtype:
        return self.sources[0].dtype

    def read(self, runs: Sequence[Runs], out: Tensor) -> None:
        for start, stop, at in _placed(runs[self.dim]):
            offset = 0
            for source in self.sources:
                low, high = max(start, offset), min(stop, offset + source.shape[self.dim])
                if low < high:
                    inner = [*runs[: self.dim], ((low - offset, high - offset),), *runs[self.dim + 1 :]]
                    source.read(inner, out.narrow(self.dim, at + low - start, high - low))
                offset += source.shape[self.dim]

    def __str__(self) -> str:
        return " and ".join(map(str, self.sources))


@dataclass(frozen=True)
class Narrowed:
    """``size`` indices of a dim from ``start``."""

    source: Source
    dim: int
    start: int
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.source.shape[: self.dim], self.size, *self.source.shape[self.dim + 1 :])

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    def read(self, runs: Sequence[Runs], out: Tensor) -> None:
        moved = tuple((a + self.start, b + self.start) for a, b in runs[self.dim])
        self.source.read([*runs[: self.dim], moved, *runs[self.dim + 1 :]], out)

    def __str__(self) -> str:
        return f"a part of {self.source}"


@dataclass(frozen=True)
class Swap:
    """Two dims exchanged."""

    source: Source
    first: int
    second: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._swapped(self.source.shape))

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    def read(self, runs: Sequence[Runs], out: Tensor) -> None:
        self.source.read(self._swapped(runs), out.transpose(self.first, self.second))

    def _swapped(self, items: Sequence[T]) -> list[T]:
        swapped = list(items)
        swapped[self.first], swapped[self.second] = swapped[self.second], swapped[self.first]
        return swapped

    def __str__(self) -> str:
        return f"{self.source}, transposed"
