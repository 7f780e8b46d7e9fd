"""Initial values of parameters that do not depend on the layout."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.errors import CompileError
from ..core.rng import Key, normal, uniform

_STEP = 2**62  # initial values are drawn at a step that training never reaches


@dataclass(frozen=True)
class Normal:
    """Normally distributed values."""

    std: float
    mean: float = 0.0

    def draw(self, positions: Sequence[Tensor], sizes: Sequence[int], key: Key, dtype: torch.dtype) -> Tensor:
        """This part's values."""
        return normal(positions, sizes, key, dtype) * self.std + self.mean


@dataclass(frozen=True)
class Uniform:
    """Uniformly distributed values in [low, high)."""

    low: float
    high: float

    def draw(self, positions: Sequence[Tensor], sizes: Sequence[int], key: Key, dtype: torch.dtype) -> Tensor:
        """This part's values."""
        return uniform(positions, sizes, key, dtype) * (self.high - self.low) + self.low


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float

    def draw(self, positions: Sequence[Tensor], sizes: Sequence[int], key: Key, dtype: torch.dtype) -> Tensor:
        """This part's values."""
        return torch.full([len(p) for p in positions], self.value, dtype=dtype)


Init = Normal | Uniform | Constant


def chosen(inits: Mapping[str, Init], names: Sequence[str]) -> dict[str, Init]:
    """The initial value of each name that a pattern matches; later patterns win.

    Raises:
        CompileError: QN204 for a pattern that matches no parameter.
    """
    found: dict[str, Init] = {}
    for pattern, init in inits.items():
        matched = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            raise CompileError("QN204", f"{pattern!r} matches no parameter", fix="see program.named_parameters()")
        found |= dict.fromkeys(matched, init)
    return found


def key_of(seed: int, number: int) -> Key:
    """The stream of the parameter with this number in the model."""
    return Key(seed, _STEP, number)
