"""In which dtype a program computes, adds up gradients, and reduces over ranks: what a plan's words mean."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch

DTYPES = MappingProxyType(
    {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32, "bfloat16": torch.bfloat16}
    | {"fp8": torch.bfloat16}  # all but products of linear layers
)


def widened(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which to add up values of ``dtype``."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


_ROUNDING = MappingProxyType({torch.float64: 1e-9, torch.float32: 1e-3})
_ROUNDING_16 = 5e-2


def rounding_of_losses(dtype: torch.dtype) -> float:
    """Return by how much, relative to them, two losses may differ that are equal but for rounding. ``dtype``: in which
    most of a model is computed."""
    return _ROUNDING.get(dtype, _ROUNDING_16)


@dataclass(frozen=True)
class Precision:
    """``compute``: of operators that gain from few bits, where the model has float32. ``reduce``: of sums of gradients
    over ranks; ``sums``: of sums of other values over ranks. ``scale``: the first factor of a scaled loss. None: as the
    model says."""

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    sums: torch.dtype | None = None
    scale: float | None = None

    @property
    def rounds(self) -> bool:
        """Whether a program differs from the model by more than the order of sums."""
        return self.compute is not None or self.reduce is torch.bfloat16

    def accumulated(self, held: torch.dtype) -> torch.dtype:
        """In which the gradient of a parameter that is held in ``held`` is added up over microbatches: never fewer
        bits than the parameter has."""
        return held if self.reduce is None else torch.promote_types(held, self.reduce)

    def reduced(self, held: torch.dtype) -> torch.dtype:
        """In which it is added up over ranks."""
        return torch.bfloat16 if self.reduce is torch.bfloat16 else self.accumulated(held)

    def summed(self, dtype: torch.dtype) -> torch.dtype:
        """In which ranks add up values of ``dtype`` that are no gradients of parameters."""
        return dtype if self.sums is None else torch.promote_types(dtype, self.sums)


def narrows(before: torch.dtype, after: torch.dtype) -> bool:
    """Whether a cast between floating dtypes rounds."""
    floating = before.is_floating_point and after.is_floating_point
    return floating and torch.promote_types(before, after) != after
