"""Optimizers of torch whose update of a matrix is another one where ranks have parts of it."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch.optim import Muon, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...core.errors import RunError
from .module_parameters import local_of


@cache
def watch_optimizers() -> None:
    """From now on, :func:`refuse_split_update` is asked before each step of an optimizer."""
    register_optimizer_step_pre_hook(refuse_split_update)


def refuse_split_update(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Muon orthogonalises a matrix by products in bfloat16, which are rounded otherwise if each rank has some terms of
    them, and the iteration enlarges the difference to that of another update.

    Raises:
        RunError: QN113 by torch.optim.Muon of a matrix of which this rank has a part.
    """
    if not isinstance(optimizer, Muon):
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None and local_of(p).shape != p.shape:
                raise RunError(
                    "QN113",
                    f"Muon needs whole matrices, and this rank has {list(local_of(p).shape)} of a parameter "
                    f"{list(p.shape)}: products of parts are rounded otherwise in bfloat16, and the update differs",
                    fix="program.optimizer(lambda p: torch.optim.Muon(p, lr), matrices): each is whole on one rank",
                )
