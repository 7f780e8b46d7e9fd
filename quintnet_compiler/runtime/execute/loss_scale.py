"""The factor that keeps gradients of 16 bits from vanishing: as torch.amp.GradScaler has it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...ir.distributed_program import DistributedProgram
from .executor import Run


@dataclass
class LossScale:
    """``scale`` multiplies the loss before the backward and divides the sums of gradients after it.

    A step with gradients that are not finite is skipped and halves it; ``patience`` good steps in a row double it. All
    ranks learn of every step whether it was good, so that theirs are equal. ``skipped``: whether the last one was not.
    """

    scale: float
    patience: int = 2000
    good: int = 0
    skipped: bool = False

    @classmethod
    def of(cls, program: DistributedProgram) -> LossScale:
        return cls(program.precision.scale or 1.0)

    def run(self, program: DistributedProgram, how: Run) -> Run:
        """``how``, with the factor: then bad gradients must be noticed."""
        scaled = how.train and program.precision.scale is not None
        return replace(how, scale=self.scale, check_finite=True) if scaled else how

    def update(self, how: Run, finite: bool) -> None:
        """After a step that was run so."""
        if how.scale is None:
            return
        self.good, self.skipped = self.good + 1 if finite else 0, not finite
        if not finite:
            self.scale /= 2
        elif self.good == self.patience:
            self.scale, self.good = 2 * self.scale, 0
