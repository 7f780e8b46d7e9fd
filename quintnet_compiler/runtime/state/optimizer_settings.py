"""The numbers of the optimizers that train a program's parameters: each has them on every rank for itself."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from .whole_optimizer import WholeOptimizer


class OptimizerSettings:
    """The optimizers that have changed one of ``parameters``.

    Args:
        parameters: by name; later ones are seen, too.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters = parameters
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        mine = weakref.ref(self)

        def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (settings := mine()) is not None and optimizer not in settings.optimizers:
                settings.add(optimizer)

        weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove)

    def add(self, optimizer: Optimizer) -> None:
        """Take an optimizer, if it has one of the parameters."""
        mine = {id(p) for p in self.parameters.values()}
        if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
            self.optimizers.add(optimizer)

    def of_all(self) -> str:
        """Return the settings of optimizers that have one group, a line for each: they are those of every stage."""
        return "\n".join(sorted(line for x in self.optimizers if len(x.param_groups) == 1 for line in _options(x)))

    def of_stage(self) -> str:
        """Return all settings, and how many steps parameters have had, a line for each."""
        return "\n".join(sorted(line for x in self.optimizers for line in (*_options(x), *_steps(x))))


def _options(optimizer: Optimizer) -> Iterator[str]:
    for number, group in enumerate(optimizer.param_groups):
        for key, value in sorted(group.items()):
            if key != "params" and (shown := _shown(value)):
                yield f"{type(optimizer).__name__}, group {number}: {key} = {shown}"


def _steps(optimizer: Optimizer) -> Iterator[str]:
    for number, group in enumerate(optimizer.param_groups):
        steps = [_shown(_state_of(optimizer, p).get("step")) for p in group["params"]]
        if any(steps):
            different = ", ".join(dict.fromkeys(step for step in steps if step))
            yield f"{type(optimizer).__name__}, group {number}: steps = {different}"


def _state_of(optimizer: Optimizer, parameter: Tensor) -> Mapping[str, Any]:
    """Return what every rank with a part of a parameter keeps of it: of a whole parameter, only its owner does."""
    state = {} if isinstance(optimizer, WholeOptimizer) else optimizer.state.get(parameter, {})
    return state if isinstance(state, Mapping) else {}


def _shown(value: Any) -> str:
    """A number, text, or several of them; "" for anything else, and for what lies on an accelerator."""
    if isinstance(value, Tensor):
        there = value.device.type != "cpu" or value.numel() > 1 or type(value) is not torch.Tensor
        return "" if there else repr(value.item())
    if isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        shown = [_shown(item) for item in value]
        return f"({', '.join(shown)})" if all(shown) else ""
    return ""
