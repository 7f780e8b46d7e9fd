"""The settings of the optimizers that train a program's parameters, as text, so that ranks can compare them."""

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
    """The optimizers that have stepped with one of ``parameters``.

    Args:
        parameters: by name; those that are added later count, too.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Watch the steps of all optimizers."""
        self.parameters = parameters
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        reference = weakref.ref(self)

        def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (settings := reference()) is not None and optimizer not in settings.optimizers:
                settings.add(optimizer)

        weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove)

    def add(self, optimizer: Optimizer) -> None:
        """Add an optimizer, if it has one of the parameters."""
        ids = {id(p) for p in self.parameters.values()}
        if any(id(p) in ids for group in optimizer.param_groups for p in group["params"]):
            self.optimizers.add(optimizer)

    def of_all(self) -> str:
        """Return the settings of optimizers with one group, a line each: these are the same in every stage."""
        return "\n".join(sorted(line for x in self.optimizers if len(x.param_groups) == 1 for line in _options(x)))

    def of_groups(self) -> str:
        """Return the settings of all groups, a line each: stages may have other groups, with other settings."""
        return "\n".join(sorted(line for x in self.optimizers for line in _options(x)))

    def of_stage(self) -> str:
        """Return all settings, and the parameters' numbers of steps, a line each."""
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
    """Return a parameter's state that every rank with a part of it has; a WholeOptimizer's has only its owner."""
    state = {} if isinstance(optimizer, WholeOptimizer) else optimizer.state.get(parameter, {})
    return state if isinstance(state, Mapping) else {}


def _shown(value: Any) -> str:
    """Return the text of a number, a string, or several of them; "" for anything else, and on accelerators."""
    if isinstance(value, Tensor):
        hidden = value.device.type != "cpu" or value.numel() > 1 or type(value) is not torch.Tensor
        return "" if hidden else repr(value.item())
    if isinstance(value, (bool, int, float, str)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        shown = [_shown(item) for item in value]
        return f"({', '.join(shown)})" if all(shown) else ""
    return ""
