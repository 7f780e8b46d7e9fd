"""Dtypes in which a program computes, adds up gradients, and reduces over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from .errors import CompileError

_COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
COMPUTE_DTYPES = MappingProxyType(_COMPUTE_DTYPES)  # by what plans call precisions; features add some
SUM_DTYPES = MappingProxyType({"float32": torch.float32, "bfloat16": torch.bfloat16})


def add_precisions(dtypes: Mapping[str, torch.dtype]) -> None:
    """Add precisions of a feature, with the dtype in which everything else computes.

    Raises:
        ValueError: if there is one of the same name.
    """
    if repeated := dtypes.keys() & COMPUTE_DTYPES.keys():
        raise ValueError(f"there is a precision {', '.join(sorted(repeated))} already")
    _COMPUTE_DTYPES.update(dtypes)


def check_precision(name: str) -> None:
    """Check that a plan's precision is there.

    Raises:
        CompileError: QN207 for a precision of a feature that is not installed.
    """
    if name not in ("model", *COMPUTE_DTYPES):
        raise CompileError(
            "QN207",
            f"precision={name!r} belongs to a feature that is not installed",
            fix=f"use one of {', '.join(COMPUTE_DTYPES)}, or leave precision out",
        )


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which to add up values of ``dtype``."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def times(x: Tensor, factor: float | Tensor) -> Tensor:
    """Return ``x`` times a number, rounded once: the host's, or a float64 on the device, which has no dims."""
    if not isinstance(factor, Tensor):
        return x * factor
    wide = widened(x.dtype)
    return (x.to(wide) * factor.to(wide)).to(x.dtype)


_LOSS_TOLERANCES = MappingProxyType({torch.float64: 1e-9, torch.float32: 1e-3})
_LOSS_TOLERANCE_16_BIT = 5e-2


def rounding_of_losses(dtype: torch.dtype) -> float:
    """Return the relative difference that rounding alone may cause between two losses.

    ``dtype``: the dtype of most of the model's operators.
    """
    return _LOSS_TOLERANCES.get(dtype, _LOSS_TOLERANCE_16_BIT)


@dataclass(frozen=True)
class Precision:
    """Dtypes of a program; None: as the model has them.

    Attributes:
        compute: of operators that gain from fewer bits, where the model has float32.
        reduce: of sums of gradients over ranks.
        sums: of sums of other values over ranks.
        scale: the first factor of a scaled loss.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    sums: torch.dtype | None = None
    scale: float | None = None

    @property
    def rounds(self) -> bool:
        """Return whether a program differs from the model by more than the order of sums."""
        return self.compute is not None or self.reduce is torch.bfloat16

    def accumulated(self, held: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of a parameter stored in ``held`` are added up over microbatches.

        It never has fewer bits than the parameter.
        """
        return held if self.reduce is None else torch.promote_types(held, self.reduce)

    def reduced(self, held: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients of a parameter stored in ``held`` are added up over ranks."""
        return torch.bfloat16 if self.reduce is torch.bfloat16 else self.accumulated(held)

    def summed(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which ranks add up values of ``dtype`` that are not gradients of parameters."""
        return dtype if self.sums is None else torch.promote_types(dtype, self.sums)


def narrows(source: torch.dtype, target: torch.dtype) -> bool:
    """Return whether a cast between floating dtypes rounds."""
    floating = source.is_floating_point and target.is_floating_point
    return floating and torch.promote_types(source, target) != target
