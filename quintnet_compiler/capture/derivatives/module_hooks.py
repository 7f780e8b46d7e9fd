"""Backward hooks of modules while they are traced: functions of what arrives at a module's results and inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...ops.derivatives.user_derivatives import after_gradients, hooked, with_tangent
from .autograd_functions import declared, joined_to, needs_gradient

Gradients = tuple[Tensor | None, ...]


class Trace(Protocol):
    """What is known of the trace that a module is called in."""

    def number(self) -> int:
        """A new one for each derivative."""

    def absent(self, number: int, place: int) -> bool | None:
        """Whether no gradient arrives at this result of derivative ``number``; None if that is not known yet."""

    def watch(self, *code: Any) -> None:
        """Notice what these change beside their results."""

    def refuse(self, what: str) -> Any: ...

    def refuse_hook(self, module: nn.Module, hook: Any, what: str) -> Any: ...


class ModuleHooks:
    """Takes the place of ``torch.utils.hooks.BackwardHook`` in a trace: one call of a module that has such hooks.

    The gradient of the module's inputs is ``hook(module, gradients of the inputs, gradients of the results)``. The
    latter arrive at the end of the module, and hooks read them at its beginning. So for each result there is a value
    ``sent`` beside the inputs, of zeros that nobody reads; its gradient is that of the result.
    """

    def __init__(self, trace: Trace, module: nn.Module, hooks: Sequence[Any], before: Sequence[Any]) -> None:
        self.trace, self.module, self.hooks, self.before = trace, module, hooks, before
        self.inputs: tuple[Any, ...] = ()

    def setup_input_hook(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs that forward is called with."""
        self.inputs = args
        if torch.is_grad_enabled() and any(map(needs_gradient, args)):
            self.inputs = tuple(torch.ops.aten.alias.default(x) if needs_gradient(x) else x for x in args)
        return self.inputs

    def setup_output_hook(self, result: Any) -> Any:
        """What the module returns for what forward returned."""
        outputs = result if isinstance(result, tuple) else (result,)
        number = self.trace.number()
        grown = [i for i, x in enumerate(outputs) if torch.is_grad_enabled() and needs_gradient(x)]
        absent = {i: len(grown) > 1 and self.trace.absent(number, i) for i in grown}
        ends = {i: outputs[i].detach() for i in grown}
        places = [i for i in grown if not absent[i]]
        if None not in absent.values() and places:
            ends |= self._from(outputs, places, self._into(outputs, places))
        if not ends:
            return result
        made = joined_to(number, tuple(ends.values()), grown, [outputs[i] for i in grown], self.trace.refuse)
        found = list(outputs)
        for i, x in zip(grown, made, strict=True):
            found[i] = x
        return tuple(found) if isinstance(result, tuple) else found[0]

    def _into(self, outputs: Sequence[Any], places: Sequence[int]) -> Mapping[int, Tensor]:
        """The hooks, in front of what uses the inputs. What gives them the gradients of the results, by place."""
        zeros = {i: torch.zeros(outputs[i].shape, dtype=outputs[i].dtype, device=outputs[i].device) for i in places}
        sent = {i: with_tangent(x, True) for i, x in zeros.items()}
        values: dict[int, Tensor] = {}
        given: list[Tensor | None] = []
        for i, x in enumerate(self.inputs):
            if needs_gradient(x):
                values[i], tangent = with_tangent(x.detach(), True)
                given.append(tangent)
            else:  # as in PyTorch: zeros for every tensor
                given.append(torch.zeros_like(x) if isinstance(x, Tensor) and values else None)
        arrived = tuple(sent[i][1] if i in sent else None for i in range(len(outputs)))
        found: Gradients = tuple(given)
        for hook in self.hooks:
            found = self._called(hook, f"{_named(self.module)}.register_full_backward_hook", found, arrived)
        if not values:
            if any(x is not None for x in found):
                self.trace.refuse_hook(self.module, self.hooks[0], "returns gradients of inputs that have none")
            return {}
        done = {i: self._declared(self.inputs[i], found[i]) for i in values}
        for i, x in values.items():
            others = [one for j, one in done.items() if j != i]
            hooked(x, [done[i], *others], self.trace.number())
        return {i: after_gradients(x, list(done.values())) for i, (x, _) in sent.items()}

    def _from(self, outputs: Sequence[Any], places: Sequence[int], sent: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The results, by place, behind the hooks of their gradients."""
        pairs = {i: with_tangent(outputs[i].detach(), True) for i in places}
        found: Gradients = tuple(pairs[i][1] if i in pairs else None for i in range(len(outputs)))
        for hook in self.before:
            found = self._called(hook, f"{_named(self.module)}.register_full_backward_pre_hook", found)
        done = [self._declared(outputs[i], found[i]) for i in places]
        done += [self._declared(x, found[i]) for i, x in sent.items()]
        return {i: after_gradients(pairs[i][0], done) for i in places}

    def _called(self, hook: Callable[..., Any], what: str, gradients: Gradients, *more: Gradients) -> Gradients:
        self.trace.watch(hook)
        with torch.no_grad():
            found = hook(self.module, gradients, *more)
        if found is None:
            self.trace.refuse_hook(self.module, hook, "returns nothing (it would run while tracing only)")
        if not isinstance(found, (tuple, list)) or len(found) != len(gradients):
            self.trace.refuse_hook(self.module, hook, f"does not return a tuple of {len(gradients)}")
        return tuple(found)

    def _declared(self, x: Tensor, gradient: Tensor | None) -> Tensor:
        found = torch.zeros_like(x) if gradient is None else gradient
        return declared(x, found, f"what a backward hook of {_named(self.module)} returns", self.trace.refuse)


def _named(module: nn.Module) -> str:
    return type(module).__name__
