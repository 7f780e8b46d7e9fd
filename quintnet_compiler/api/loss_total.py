"""The loss of several batches, as if they were one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..driver.whole_loss.total import PartTotals

if TYPE_CHECKING:
    from .compiled_program import CompiledProgram


class LossTotal:
    """The loss of the batches that were added, as if they were one, see :meth:`CompiledProgram.evaluate_together`."""

    def __init__(self, program: CompiledProgram) -> None:
        self._program, self._totals = program, PartTotals()

    def add(self, batch: Any) -> None:
        """Evaluate a global batch."""
        self._totals.add(*self._program._evaluated_parts(batch))

    def loss(self) -> Tensor:
        """Return the loss, a scalar in float64 on the CPU."""
        return self._totals.loss()
