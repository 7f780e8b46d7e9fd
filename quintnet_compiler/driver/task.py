"""What a user asked to compile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..core.absent_gpu import AbsentGpu
from ..core.mesh import Mesh
from ..ir.plan import Plan
from ..ops.rules.notation import Rule

if TYPE_CHECKING:
    from ..capture.step_module import LossFn

CHECKS = ("first", "always", "off")


@dataclass(frozen=True)
class Task:
    """The model of a user, its loss, and the decisions made so far.

    Attributes:
        check: which programs are compared with the module.
        tune_process, compare_every: see :func:`quintnet.compile`.
        absent: what ``device`` is, where this machine has none: programs are compiled, and do not run.
        cache: the folder of programs that were compiled earlier.
    """

    model: nn.Module
    loss_fn: LossFn | None
    mesh: Mesh
    plan: Plan
    rules: Mapping[Any, Rule]
    device: torch.device
    check_finite: bool = True
    training: bool = True
    backend: str = "eager"
    check: str = "first"
    tune_process: bool = True
    absent: AbsentGpu | None = None
    cache: Path | None = None
    compare_every: int = 100

    @property
    def primary_kind(self) -> str:
        """The kind of program that decides where parameters live."""
        return "train" if self.training else "outputs"

    def for_comparison(self, **changes: Any) -> Task:
        """A task beside this one, to compare with: its programs are neither compared nor kept themselves."""
        return replace(self, check="off", cache=None, **changes)

    @property
    def fused(self) -> bool:
        """Return whether the engine of the programs fuses operators."""
        return self.backend != "eager"


def modules_of(task: Task) -> dict[str, nn.Module]:
    """Return the modules whose parameters a task's programs read, by the prefix of the names of these."""
    modules = {"": task.model}
    return {**modules, "loss_fn": task.loss_fn} if isinstance(task.loss_fn, nn.Module) else modules
