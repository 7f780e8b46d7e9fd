"""Dynamic loss scaling, which keeps fp16 gradients from vanishing: the same as torch.amp.GradScaler."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...ir.distributed_program import DistributedProgram
from .executor import Run


@dataclass
class LossScale:
    """The loss scale of a program, the same on all ranks.

    Attributes:
        scale: multiplies the loss before the backward, and divides the sums of gradients after it. A step whose
            gradients are not finite is skipped, and halves it.
        patience: that many finite steps in a row double the scale.
        good: finite steps since the scale changed or a step was skipped.
        skipped: whether the last step was skipped.
    """

    scale: float
    patience: int = 2000
    good: int = 0
    skipped: bool = False

    @classmethod
    def initial(cls, program: DistributedProgram) -> LossScale:
        """Return the initial loss scale of a program, 1 where it has none."""
        return cls(program.precision.scale or 1.0)

    def with_scale(self, program: DistributedProgram, options: Run) -> Run:
        """Return ``options`` with the loss scale, if the program has one; the step must then check for overflow."""
        scaled = options.train and program.precision.scale is not None
        return replace(options, scale=self.scale, check_finite=True) if scaled else options

    def update(self, options: Run, finite: bool) -> None:
        """Adapt the scale after a step with these ``options``."""
        if options.scale is None:
            return
        self.good, self.skipped = self.good + 1 if finite else 0, not finite
        if not finite:
            self.scale /= 2
        elif self.good == self.patience:
            self.scale, self.good = 2 * self.scale, 0
