"""Callbacks of a Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from .trainer import Trainer


class Callback:
    """Methods that a Trainer calls on every rank, in the order of its ``callbacks``; by default they do nothing.

    ``trainer.history`` has the step and the losses, ``trainer.program`` and ``trainer.optimizer`` are trained.
    Collective calls (``program.evaluate``, ``full_tensor()``) must be made on every rank; ``program.first`` is true on
    the one that writes files. An error ends the run.
    """

    def on_start(self, trainer: Trainer) -> None:
        """Before the first step; ``trainer.history.resumed_from`` is the step of the checkpoint that was loaded."""

    def on_step(self, trainer: Trainer, loss: Tensor) -> None:
        """After each optimizer step. ``loss``: a scalar on the program's device, the same on every rank."""

    def on_log(self, trainer: Trainer, numbers: Mapping[str, float]) -> None:
        """After :meth:`on_step`, every ``log_every`` steps: loss, gradient norm, learning rate, memory, speed."""

    def on_validation(self, trainer: Trainer, numbers: Mapping[str, float]) -> None:
        """After each validation: the mean loss, and the metrics."""

    def on_save(self, trainer: Trainer, saving: Future[Path | str]) -> None:
        """After a checkpoint of ``trainer.history.step`` is copied, while it is written.

        ``saving.result()`` waits for its path, ``saving.add_done_callback`` does not.
        """

    def on_preempt(self, trainer: Trainer) -> None:
        """After a scheduler has asked the run to end, before everything is saved."""

    def on_end(self, trainer: Trainer) -> None:
        """After the last step, also if an error or a scheduler ended the run."""
