"""Initial values of parameters that do not depend on the layout."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..compat.torch import version
from ..core.errors import CompileError
from ..core.rng import Key, normal, uniform

_STEP = 2**62  # initial values are drawn at a step that training never reaches


@dataclass(frozen=True)
class Normal:
    """Normally distributed values."""

    std: float
    mean: float = 0.0

    def draw(self, positions: Sequence[Tensor], sizes: Sequence[int], key: Key, dtype: torch.dtype) -> Tensor:
        """Return the values of one part of a tensor."""
        return normal(positions, sizes, key, dtype) * self.std + self.mean


@dataclass(frozen=True)
class Uniform:
    """Uniformly distributed values in [low, high)."""

    low: float
    high: float

    def draw(self, positions: Sequence[Tensor], sizes: Sequence[int], key: Key, dtype: torch.dtype) -> Tensor:
        """Return the values of one part of a tensor."""
        return uniform(positions, sizes, key, dtype) * (self.high - self.low) + self.low


@dataclass(frozen=True)
class Constant:
    """The same value everywhere."""

    value: float

    def draw(self, positions: Sequence[Tensor], sizes: Sequence[int], key: Key, dtype: torch.dtype) -> Tensor:
        """Return the values of one part of a tensor."""
        return torch.full([len(p) for p in positions], self.value, dtype=dtype)


Init = Normal | Uniform | Constant
Fill = Callable[[Tensor], Any]  # writes a tensor, or returns another one; such as torch.nn.init.xavier_uniform_


def match_names(
    inits: Mapping[str, Init | Fill], names: Sequence[str], others: Collection[str] = ()
) -> dict[str, Init | Fill]:
    """Return the initial value of each name that a pattern matches; later patterns win.

    ``others``: names that are matched only as they are (buffers).

    Raises:
        CompileError: QN204 for a pattern that matches no parameter.
    """
    initial: dict[str, Init | Fill] = {}
    for pattern, init in inits.items():
        matched = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        matched += [pattern] if pattern in others else []
        if not matched:
            raise CompileError("QN204", f"{pattern!r} matches no parameter", fix="see program.named_parameters()")
        initial |= dict.fromkeys(matched, init)
    return initial


def run_fill(name: str, fill: Fill, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return the whole tensor that a function computes on the CPU.

    Raises:
        CompileError: QN604 if it leaves values open, or returns another shape or dtype.
    """
    argument = torch.empty(tuple(shape), dtype=dtype)
    if dtype.is_floating_point:
        argument.fill_(torch.nan)
    first_version = version(argument)
    result = fill(argument)
    x = result if isinstance(result, Tensor) else argument
    if x.shape != argument.shape or x.dtype != dtype or x.device.type != "cpu":
        has, wanted = f"{tuple(x.shape)} {x.dtype} on {x.device.type}", f"{tuple(shape)} {dtype} on cpu"
        raise CompileError(
            "QN604", f"the function for {name} gave {has}", fix=f"return {wanted}, or write its argument"
        )
    if (x is argument and version(x) == first_version) or bool(torch.isnan(x).any()):
        message = f"the function for {name} left elements without a number"
        raise CompileError("QN604", message, fix="write all of its argument, as torch.nn.init's functions do")
    return x.detach()


def key_of(seed: int, number: int) -> Key:
    """The stream of the parameter with this number in the model."""
    return Key(seed, _STEP, number)
