"""PEFT's LoRA of parameters (``target_parameters``), which changes the class of a module in forward: while a model is
captured, its weight is computed instead, and of experts each row goes through the two factors beside the weight.

Nothing here imports peft: a model with such adapters has imported it already.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.transformers import EXPERTS_CHOICE
from ..core.replaced import for_this_thread
from ..ops.experts.expert_linear import expert_linear

Factors = tuple[Tensor, Tensor, float]  # the left, the right, and what their product is multiplied with


@dataclass(frozen=True)
class AdaptedExperts:
    """The adapters of experts that are running: by module and name of the parameter [E, O, I], or [E, I, O]."""

    choice: str
    active: dict[tuple[nn.Module, str], list[Factors]] = field(default_factory=dict)

    def layer(self, module: Any, name: str, rows: Tensor, ids: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
        """Apply ``expert_linear`` with a parameter of ``module`` and its adapters.

        ``x (W + s L R) = x W + s (x L) R``: so no weight is made for all experts, nor a gradient of one.
        """
        out: Tensor = expert_linear(rows, ids, getattr(module, name), bias, transposed)
        for left, right, scale in self.active.get((module, name), ()):
            first, second = (left, right) if transposed else (right, left)
            inner = expert_linear(rows, ids, first, None, transposed)
            out = out + scale * expert_linear(inner, ids, second, None, transposed)
        return out

    @contextlib.contextmanager
    def running(self, wrapper: Any) -> Iterator[None]:
        """While inside, the module in ``wrapper`` computes with its adapters."""
        base, name = wrapper.get_base_layer(), wrapper.parameter_name
        adapters = [adapter for adapter in wrapper.active_adapters if adapter in wrapper.lora_A]
        if wrapper.num_experts > 1 and getattr(getattr(base, "config", None), EXPERTS_CHOICE, None) == self.choice:
            self.active[base, name] = [wrapper.get_delta_factors(adapter) for adapter in adapters]
            try:
                yield
            finally:
                del self.active[base, name]
            return
        weight = wrapper.get_param()
        for adapter in adapters:
            weight = weight + wrapper.get_delta_weight(adapter)
        base.__dict__[name] = weight  # found before the parameter
        try:
            yield
        finally:
            del base.__dict__[name]


@contextlib.contextmanager
def adapters_without_classes(model: nn.Module, choice: str) -> Iterator[AdaptedExperts]:
    """While inside, PEFT's wrappers of parameters change no class. ``choice``: what runs the experts of models whose
    adapters the result has."""
    running = AdaptedExperts(choice)
    kind = _wrapper_class()
    if kind is None or not any(isinstance(module, kind) for module in model.modules()):
        yield running
        return
    theirs: Callable[..., Any] = kind.forward

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        plain = self.disable_adapters or self.merged or kwargs.get("adapter_names") is not None
        if plain or self.get_param().dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            return theirs(self, x, *args, **kwargs)
        with running.running(self):
            return self.base_layer(x, *args, **kwargs)

    kind.forward = for_this_thread(forward, theirs)
    try:
        yield running
    finally:
        kind.forward = theirs


def _wrapper_class() -> Any:
    return getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", None)
