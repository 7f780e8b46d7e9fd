"""Options of one run of a program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from ...core.rng import AnyKey, Key
from ..launch.preemption import Preemption


@dataclass(frozen=True)
class Run:
    """Options of one run of a program.

    Attributes:
        train: compute gradients.
        local: inputs are this data rank's rows, instead of the whole batch.
        seed: random masks depend on it and on ``step``.
        step: the number of the step.
        check_finite: look for NaN and Inf in the loss and the gradients.
        scale: the loss scale, which may be a float64 on the device; None where the loss is not scaled.
        preemption: whether some rank is asked to end, which a training step asks it and tells it.
        keys: makes the key of random numbers of a seed, a step and the number of an operator.
    """

    train: bool = False
    local: bool = False
    seed: int = 0
    step: int = 0
    check_finite: bool = True
    scale: float | Tensor | None = None
    preemption: Preemption | None = None
    keys: Callable[[int, int, int], AnyKey] = Key

    @property
    def may_skip(self) -> bool:
        """Return whether the loss scale may have caused an overflow; scales up to 1 cannot."""
        return self.scale is not None and bool(self.scale > 1)
