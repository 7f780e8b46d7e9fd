"""Refuse optimizers whose update would differ from the unsplit one where ranks have parts of parameters."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Muon, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...compat.interpreter import call_once
from ...compat.torch_codegen import SHIPPED
from ...core.errors import RunError
from .module_parameters import local_of


@call_once
def watch_optimizers() -> None:
    """Register :func:`refuse_split_update` and :class:`RandomDraws` as hooks of every optimizer's step."""
    draws = RandomDraws()
    register_optimizer_step_pre_hook(refuse_split_update)
    register_optimizer_step_pre_hook(draws.record_state)
    register_optimizer_step_post_hook(draws.compare_state)


class RandomDraws:
    """Detects optimizers that draw random numbers where each rank would draw those of its own parts."""

    def __init__(self) -> None:
        """Begin without states of random numbers."""
        self._states: WeakKeyDictionary[Optimizer, Tensor] = WeakKeyDictionary()

    def record_state(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Remember the state of random numbers before the step of an optimizer of split parameters."""
        closure = len(args) > 1 or kwargs  # a closure runs the program, which may draw numbers
        if not closure and any(_is_split(p) for group in optimizer.param_groups for p in group["params"]):
            self._states[optimizer] = torch.get_rng_state()

    def compare_state(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Compare the state after the step.

        Raises:
            RunError: QN113 if the step has drawn random numbers.
        """
        state = self._states.pop(optimizer, None)
        if state is not None and not SHIPPED.equal(state, torch.get_rng_state()):
            raise RunError(
                "QN113",
                f"{type(optimizer).__name__} has drawn random numbers: each rank draws them for its parts of "
                "parameters, so the update is not that of the unsplit module",
                fix="train over dp alone, without zero: then each rank draws the numbers of the unsplit module",
            )


def _is_split(p: Tensor) -> bool:
    """Return whether this rank has only a part of the parameter, or other ranks have other parameters."""
    if not isinstance(p, DTensor) or p.grad is None:
        return False
    return local_of(p).shape != p.shape or p.device_mesh.size() < dist.get_world_size()


def refuse_split_update(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse Muon for split matrices.

    Muon orthogonalizes a matrix by products in bfloat16. Sums over the ranks' terms are rounded differently, and the
    iteration amplifies the difference into another update.

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
