"""Trace backward hooks of modules: functions of the gradients of a module's results and inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.derivatives.user_derivatives import after_gradients, hooked, with_tangent
from .autograd_functions import Trace, declared, joined_to, needs_gradient

Gradients = tuple[Tensor | None, ...]


class ModuleHooks:
    """One call of a module with backward hooks, in place of ``torch.utils.hooks.BackwardHook`` in a trace.

    The gradient of the module's inputs is ``hook(module, gradients of inputs, gradients of results)``. The latter
    arrive at the end of the module, and hooks read them at its beginning. So for each result there is a value ``sent``
    at the beginning, zeros that nothing reads; its gradient is that of the result.
    """

    def __init__(self, trace: Trace, module: nn.Module, hooks: Sequence[Any], pre_hooks: Sequence[Any]) -> None:
        self.trace, self.module, self.hooks, self.pre_hooks = trace, module, hooks, pre_hooks
        self.inputs: tuple[Any, ...] = ()

    def setup_input_hook(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the inputs to call forward with."""
        self.inputs = args
        if torch.is_grad_enabled() and any(map(needs_gradient, args)):
            self.inputs = tuple(torch.ops.aten.alias.default(x) if needs_gradient(x) else x for x in args)
        return self.inputs

    def setup_output_hook(self, result: Any) -> Any:
        """Return the module's results for those of forward."""
        outputs = result if isinstance(result, tuple) else (result,)
        number = self.trace.next_number()
        grown = [i for i, x in enumerate(outputs) if torch.is_grad_enabled() and needs_gradient(x)]
        absent = {i: len(grown) > 1 and self.trace.absent(number, i) for i in grown}
        ends = {i: outputs[i].detach() for i in grown}
        places = [i for i in grown if not absent[i]]
        if None not in absent.values() and places:
            ends |= self._from(outputs, places, self._into(outputs, places))
        if not ends:
            return result
        joined = joined_to(number, tuple(ends.values()), grown, [outputs[i] for i in grown], self.trace.refuse)
        results = list(outputs)
        for i, x in zip(grown, joined, strict=True):
            results[i] = x
        return tuple(results) if isinstance(result, tuple) else results[0]

    def _into(self, outputs: Sequence[Any], places: Sequence[int]) -> Mapping[int, Tensor]:
        """Trace the hooks before the users of the inputs; return values whose gradients are those of the results."""
        zeros = {i: torch.zeros(outputs[i].shape, dtype=outputs[i].dtype, device=outputs[i].device) for i in places}
        sent = {i: with_tangent(x, True) for i, x in zeros.items()}
        values, gradients = self._inputs_with_tangents()
        arrived = tuple(sent[i][1] if i in sent else None for i in range(len(outputs)))
        for hook in self.hooks:
            gradients = self._called(hook, f"{_named(self.module)}.register_full_backward_hook", gradients, arrived)
        if not values:
            if any(x is not None for x in gradients):
                self.trace.refuse_hook(self.module, self.hooks[0], "returns gradients of inputs that have none")
            return {}
        done = {i: self._declared(self.inputs[i], gradients[i]) for i in values}
        for i, x in values.items():
            others = [token for j, token in done.items() if j != i]
            hooked(x, [done[i], *others], self.trace.next_number())
        return {i: after_gradients(x, list(done.values())) for i, (x, _) in sent.items()}

    def _inputs_with_tangents(self) -> tuple[dict[int, Tensor], Gradients]:
        """Return the values of inputs that need a gradient, by place, and the gradients that arrive at all inputs."""
        values: dict[int, Tensor] = {}
        tangents: list[Tensor | None] = []
        for i, x in enumerate(self.inputs):
            if needs_gradient(x):
                values[i], tangent = with_tangent(x.detach(), True)
                tangents.append(tangent)
            else:  # as in PyTorch: zeros for every tensor
                tangents.append(torch.zeros_like(x) if isinstance(x, Tensor) and values else None)
        return values, tuple(tangents)

    def _from(self, outputs: Sequence[Any], places: Sequence[int], sent: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Trace the pre-hooks; return the results, by place, after which they run."""
        pairs = {i: with_tangent(outputs[i].detach(), True) for i in places}
        gradients: Gradients = tuple(pairs[i][1] if i in pairs else None for i in range(len(outputs)))
        for hook in self.pre_hooks:
            gradients = self._called(hook, f"{_named(self.module)}.register_full_backward_pre_hook", gradients)
        done = [self._declared(outputs[i], gradients[i]) for i in places]
        done += [self._declared(x, gradients[i]) for i, x in sent.items()]
        return {i: after_gradients(pairs[i][0], done) for i in places}

    def _called(self, hook: Callable[..., Any], what: str, gradients: Gradients, *more: Gradients) -> Gradients:
        self.trace.watch(hook)
        with torch.no_grad():
            returned = hook(self.module, gradients, *more)
        if returned is None:
            self.trace.refuse_hook(self.module, hook, "returns nothing (it would run while tracing only)")
        if not isinstance(returned, (tuple, list)) or len(returned) != len(gradients):
            self.trace.refuse_hook(self.module, hook, f"does not return a tuple of {len(gradients)}")
        return tuple(returned)

    def _declared(self, x: Tensor, gradient: Tensor | None) -> Tensor:
        declared_gradient = torch.zeros_like(x) if gradient is None else gradient
        return declared(
            x, declared_gradient, f"what a backward hook of {_named(self.module)} returns", self.trace.refuse
        )


def _named(module: nn.Module) -> str:
    return type(module).__name__
