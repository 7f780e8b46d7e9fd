"""Optimizers whose update is another one where ranks have parts of parameters."""

from __future__ import annotations

from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Muon, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...core.errors import RunError
from .module_parameters import local_of


@cache
def watch_optimizers() -> None:
    """From now on, :func:`refuse_split_update` is asked before each step of an optimizer, and :class:`RandomDraws`
    before and after it."""
    draws = RandomDraws()
    register_optimizer_step_pre_hook(refuse_split_update)
    register_optimizer_step_pre_hook(draws.before)
    register_optimizer_step_post_hook(draws.after)


class RandomDraws:
    """Looks whether an optimizer draws random numbers where each rank would draw those of its parts."""

    def __init__(self) -> None:
        self._states: WeakKeyDictionary[Optimizer, Tensor] = WeakKeyDictionary()

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        closure = len(args) > 1 or kwargs  # which would run steps in between
        if not closure and any(_elsewhere(p) for group in optimizer.param_groups for p in group["params"]):
            self._states[optimizer] = torch.get_rng_state()

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Raises: RunError QN113 if the step has drawn numbers."""
        state = self._states.pop(optimizer, None)
        if state is not None and not torch.equal(state, torch.get_rng_state()):
            raise RunError(
                "QN113",
                f"{type(optimizer).__name__} has drawn random numbers: each rank draws them for its parts of "
                "parameters, so the update is not that of the unsplit module",
                fix="train over dp alone, without zero: then each rank draws the numbers of the unsplit module",
            )


def _elsewhere(p: Tensor) -> bool:
    """Return whether this rank has a part of the parameter, or other ranks have other parameters."""
    if not isinstance(p, DTensor) or p.grad is None:
        return False
    return local_of(p).shape != p.shape or p.device_mesh.size() < dist.get_world_size()


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
