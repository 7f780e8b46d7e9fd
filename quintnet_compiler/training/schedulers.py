"""Learning-rate schedulers of torch.optim, as a Trainer steps them."""

from __future__ import annotations

import inspect
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..core.errors import CompileError


def follows_validation(scheduler: Any) -> bool:
    """Return whether a scheduler is stepped with the loss of each validation, not after each optimizer step."""
    return isinstance(scheduler, ReduceLROnPlateau)


def require_steps(scheduler: Any, *, validation: bool) -> None:
    """Refuse a scheduler that a Trainer cannot step. ``validation``: whether there are validations.

    Raises:
        CompileError: QN108.
    """
    if scheduler is None:
        return
    name = type(scheduler).__name__
    if follows_validation(scheduler):
        if not validation:
            raise CompileError(
                "QN108",
                f"{name} is stepped with the loss of each validation, and there is no val_loader",
                fix="give the Trainer a val_loader, or another scheduler",
            )
        return
    parameters = inspect.signature(scheduler.step).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if needed:
        raise CompileError(
            "QN108",
            f"{name}.step needs {', '.join(needed)}, which a Trainer does not have",
            fix="leave scheduler out, and step it in a callback: on_step or on_validation",
        )
