"""What was made for tensors of one layout (dtypes, sizes, strides), found again for others of the same layout."""

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
class _Made(Generic[T]):
    """Columns of equal length, which C code compares."""

    dtypes: list[Any]
    sizes: list[tuple[int, ...]]
    strides: list[tuple[int, ...]]
    made: T

    @classmethod
    def of(cls, args: Sequence[Tensor], made: T) -> _Made[T]:
        return cls([x.dtype for x in args], [tuple(x.shape) for x in args], [x.stride() for x in args], made)

    def fits(self, args: Sequence[Tensor]) -> bool:
        """Whether ``args`` (as many as those before) have this layout. The stride of a dim of size 1 says nothing."""
        try:
            deque(map(assert_size_stride, args, self.sizes, self.strides), maxlen=0)
        except AssertionError:
            return False
        return list(map(_DTYPE, args)) == self.dtypes


@dataclass
class ByLayout(Generic[T]):
    """What was made for a fixed number of tensors, by their layout. That it is the layout of the last call, which it
    almost always is, is seen in a tenth of the time that it takes to name a layout."""

    found: dict[tuple[Any, ...], T] = field(default_factory=dict)
    last: _Made[T] | None = None

    def get(self, args: Sequence[Tensor]) -> T | None:
        """What was put for tensors laid out like ``args``; None if nothing was."""
        if self.last is not None and self.last.fits(args):
            return self.last.made
        made = self.found.get(_key(args))
        if made is not None:
            self.last = _Made.of(args, made)
        return made

    def put(self, args: Sequence[Tensor], made: T) -> T:
        """Returns ``made``."""
        self.found[_key(args)] = made
        self.last = _Made.of(args, made)
        return made

    def __len__(self) -> int:
        return len(self.found)

    def __iter__(self) -> Iterator[T]:
        return iter(self.found.values())

    def clear(self) -> None:
        self.found.clear()
        self.last = None


def _key(args: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple([(x.dtype, x.shape, x.stride()) for x in args])
