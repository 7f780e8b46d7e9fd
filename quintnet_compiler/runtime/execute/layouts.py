"""A cache by the layout (dtypes, sizes, strides) of tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Generic, TypeVar

from torch import Tensor

from ...compat.torch import assert_size_stride

T = TypeVar("T")
_DTYPE = attrgetter("dtype")


@dataclass(frozen=True)
class _LayoutEntry(Generic[T]):
    """A cached value and the layout of its tensors, as columns that C code compares."""

    dtypes: list[Any]
    sizes: list[tuple[int, ...]]
    strides: list[tuple[int, ...]]
    cached: T

    @classmethod
    def from_args(cls, args: Sequence[Tensor], cached: T) -> _LayoutEntry[T]:
        """Return the entry of ``cached`` for the layout of ``args``."""
        return cls([x.dtype for x in args], [tuple(x.shape) for x in args], [x.stride() for x in args], cached)

    def fits(self, args: Sequence[Tensor]) -> bool:
        """Return whether as many ``args`` have this layout; strides of dims of size 1 are ignored."""
        try:
            deque(map(assert_size_stride, args, self.sizes, self.strides), maxlen=0)
        except AssertionError:
            return False
        return list(map(_DTYPE, args)) == self.dtypes


@dataclass
class ByLayout(Generic[T]):
    """A cache by the layout of a fixed number of tensors.

    The layout of a call is almost always that of the last call; to compare with that one takes a tenth of the time
    that building a key takes.
    """

    entries: dict[tuple[Any, ...], T] = field(default_factory=dict)
    last: _LayoutEntry[T] | None = None

    def get(self, args: Sequence[Tensor]) -> T | None:
        """Return the value that was put for the layout of ``args``, or None."""
        if self.last is not None and self.last.fits(args):
            return self.last.cached
        cached = self.entries.get(_key(args))
        if cached is not None:
            self.last = _LayoutEntry.from_args(args, cached)
        return cached

    def store(self, args: Sequence[Tensor], cached: T) -> T:
        """Store ``cached`` for the layout of ``args``, and return it."""
        self.entries[_key(args)] = cached
        self.last = _LayoutEntry.from_args(args, cached)
        return cached

    def __len__(self) -> int:
        """Return the number of layouts."""
        return len(self.entries)

    def __iter__(self) -> Iterator[T]:
        """Yield the cached values."""
        return iter(self.entries.values())

    def clear(self) -> None:
        """Forget all values."""
        self.entries.clear()
        self.last = None


def _key(args: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple([(x.dtype, x.shape, x.stride()) for x in args])
