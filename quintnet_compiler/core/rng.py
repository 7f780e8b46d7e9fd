"""Random numbers that do not depend on the layout.

The number of an element is a function of a key and of the element's global position alone, so ranks that hold
different parts of a tensor, in any order and any overlap, draw the same global noise without communication.

A tensor is read as a matrix: its last dim is the column, all other dims together are the row. Every row and every
column gets a 64-bit hash, and an element combines the two. Rows and columns are few and elements are many: the hashes
can afford to be good, the combination must be cheap. All arithmetic is on integers that wrap around, hence exact on
every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar

import torch
from torch import Tensor

from ..compat.torch_codegen import SHIPPED

_Word = TypeVar("_Word", int, Tensor)

# SplitMix64's constants, as the int64 numbers they are congruent to: torch has no arithmetic on uint64.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


@dataclass(frozen=True)
class Key:
    """The key of a stream of numbers: three non-negative ints. Streams of different keys are independent."""

    seed: int
    step: int
    op: int

    def hash(self, stream: int) -> int:
        """Return the key and the number of one of its streams as an int64: one SplitMix64 step takes in one number."""
        state = 0
        for number in (self.seed, self.step, self.op, stream):
            state = _mix((state ^ number) + _GAMMA) % 2**64
        return state - 2**63


@dataclass(frozen=True)
class KeyOnDevice:
    """The hashes of a key on the device, where they can change between runs of the same kernels: int64 [2]."""

    hashes: Tensor

    def hash(self, stream: int) -> Tensor:
        """Return the hash of the key and the number of one of its streams."""
        return self.hashes[stream]


AnyKey = Key | KeyOnDevice


def keep_mask(positions: Sequence[Tensor], sizes: Sequence[int], p: float, key: AnyKey) -> Tensor:
    """Return which elements dropout keeps: a bool tensor, True with probability 1 - p (a multiple of 2**-32).

    Its shape is ``[len(positions[0]), len(positions[1]), ...]``, its bits are the same on every device.

    Args:
        positions: for every dim, the global positions that are held here: 1-D int64 tensors, in any order.
        sizes: the global shape.
        p: the probability of dropping an element, 0 <= p <= 1.
        key: which stream of numbers.
    """
    word = bits(positions, sizes, key)
    # p * 2**32 is exact: only the exponent changes. For p = 1 the threshold, 2**31, would be no int32.
    return word.ge(int(p * 2**32) - 2**31) if p < 1 else SHIPPED.zeros_like(word, dtype=torch.bool)


def bits(positions: Sequence[Tensor], sizes: Sequence[int], key: AnyKey, dtype: torch.dtype = torch.int32) -> Tensor:
    """Return uniform numbers of all that int32 has, the same on every device; for comparisons.

    Arguments and shape are those of :func:`keep_mask`.
    """
    rows, columns = _hashes(positions, sizes, key)
    # Two rounds take in a half of each hash: five passes over one buffer of int32. The conversion keeps the low bits.
    word = _stir(rows.to(torch.int32) + columns.to(torch.int32))
    word = word.bitwise_xor_((rows >> 32).to(torch.int32)).bitwise_xor_((columns >> 32).to(torch.int32))
    return _stir(word)


def uniform(positions: Sequence[Tensor], sizes: Sequence[int], key: AnyKey, dtype: torch.dtype) -> Tensor:
    """Return uniform numbers in [0, 1): multiples of 2**-53 in float64, of 2**-24 in float32.

    Arguments and shape are those of :func:`keep_mask`; ``dtype`` is a floating-point type.
    """
    digits = 1 - round(math.log2(torch.finfo(dtype).eps))
    return _bits(positions, sizes, key, digits).to(dtype).mul_(2.0**-digits)


def normal(positions: Sequence[Tensor], sizes: Sequence[int], key: AnyKey, dtype: torch.dtype) -> Tensor:
    """Return standard normal numbers: the inverse distribution function of uniform ones, computed in float64.

    Arguments and shape are those of :func:`keep_mask`; ``dtype`` is a floating-point type. Devices agree to rounding.
    """
    # The midpoints of 2**52 equal intervals: exact in float64, symmetric about 1/2, never 0 or 1.
    middles = _bits(positions, sizes, key, 52).to(torch.float64).add_(0.5).mul_(2.0**-52)
    normals: Tensor = torch.special.ndtri(middles)
    return normals.to(dtype)


def exponential(positions: Sequence[Tensor], sizes: Sequence[int], key: AnyKey, dtype: torch.dtype) -> Tensor:
    """Return exponential numbers of rate 1, all above 0: the inverse distribution function, computed in float64.

    Arguments and shape are those of :func:`keep_mask`; ``dtype`` is a floating-point type. Devices agree to rounding.
    """
    middles = _bits(positions, sizes, key, 52).to(torch.float64).add_(0.5).mul_(-(2.0**-52))
    return middles.log1p_().neg_().to(dtype).clamp_(min=torch.finfo(dtype).tiny)


DISTRIBUTIONS: Mapping[str, Callable[[Sequence[Tensor], Sequence[int], AnyKey, torch.dtype], Tensor]] = (
    MappingProxyType({"uniform": uniform, "normal": normal, "exponential": exponential, "bits": bits})
)
"""The standard distributions, by the names that programs call them by."""


def _bits(positions: Sequence[Tensor], sizes: Sequence[int], key: AnyKey, count: int) -> Tensor:
    """Return ``count`` < 64 random bits per element, as non-negative int64."""
    rows, columns = _hashes(positions, sizes, key)
    return (_mix(rows + columns) >> (64 - count)) & ((1 << count) - 1)


def _hashes(positions: Sequence[Tensor], sizes: Sequence[int], key: AnyKey) -> tuple[Tensor, Tensor]:
    """Return the 64-bit hashes of rows, [..., 1], and of columns, [n]; broadcast, they have the result's shape."""
    *leading, columns = positions or [SHIPPED.zeros((), dtype=torch.int64)]
    rows = columns.new_zeros(())
    for position, size in zip(leading, sizes, strict=False):  # the columns' size plays no role
        rows = (rows * size + position).unsqueeze(-1)
    # Output number i of the generator SplitMix64 is the mix of seed + i * gamma.
    return _mix(rows * _GAMMA + key.hash(0)), _mix(columns * _GAMMA + key.hash(1))


def _mix(x: _Word) -> _Word:
    """Apply SplitMix64's finalizer (Steele, Lea, Flood 2014; Stafford's Mix13): every bit in sways every bit out.

    The masks make the shifts logical. They also read no bit above the 64th, so a Python int need not wrap around.
    """
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _MIX_2
    return x ^ ((x >> 31) & (2**33 - 1))


def _stir(word: Tensor) -> Tensor:
    """Compute x + 2x² in place: the permutation of 32-bit words in the cipher RC6 (Rivest et al. 1998).

    Invertible, so no word becomes likelier; not linear, so the sums over a rectangle's corners are not related. The
    high bits, which decide a comparison, depend on all lower ones. One pass, where a shift would need a second buffer.
    """
    return word.addcmul_(word, word, value=2)
