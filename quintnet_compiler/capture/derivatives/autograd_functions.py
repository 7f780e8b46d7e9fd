"""Trace ``torch.autograd.Function``: its forward and its backward become nodes of one graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from ...compat.torch import pytree, storage_key
from ...compat.torch_func import nodes_of_trace
from ...compat.torch_hooks import FunctionBase, takes_gradients_as_list
from ...ops.derivatives.user_derivatives import after_gradients, declare_gradient, hooked, with_tangent
from ..changes.backward_writes import BACKWARD
from .inner_gradients import InnerGradients

Refuse = Callable[[str], Any]


class Trace(Protocol):
    """The trace that the user's derivatives are in."""

    inner: InnerGradients

    def next_number(self) -> int:
        """Return a new number for a derivative."""

    def absent(self, number: int, place: int) -> bool | None:
        """Return whether no gradient arrives at this result of derivative ``number``; None if not known yet."""

    def watch(self, *code: Any) -> None:
        """Watch functions for changes of Python state."""

    def forbid_changes(self, x: Tensor, what: str) -> None:
        """Record that ``x`` must not change in place from now on."""

    def refuse(self, what: str) -> Any: ...

    def refuse_hook(self, module: nn.Module, hook: Any, what: str) -> Any: ...


@contextlib.contextmanager
def of_backward(number: int) -> Iterator[None]:
    """Mark what is traced inside as computed by the derivative ``number``."""
    first = len(nodes_of_trace())
    yield
    for node in nodes_of_trace()[first:]:
        node.meta[BACKWARD] = number


class _Context(FunctionCtx):
    """The context of a Function, from its forward to its backward."""

    def __init__(self, needs: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs
        self.to_save: tuple[Any, ...] = ()
        self.dirty_tensors: tuple[Tensor, ...] = ()
        self.non_differentiable: tuple[Tensor, ...] = ()
        self.materialize_grads = True

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return self.to_save


class Joined(torch.autograd.Function):
    """A Function whose outputs need gradients in the rest of the trace, as those of the user's Function do."""

    @staticmethod
    def forward(
        ctx: Any, number: int, places: Sequence[int], refuse: Refuse, outputs: tuple[Tensor, ...], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.number, ctx.places, ctx.refuse = number, tuple(places), refuse
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.refuse("torch.autograd.grad in forward, through a derivative that is your own,")


def needs_gradient(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _constant(x: Any) -> Any:
    return x.detach() if needs_gradient(x) else x


def trace_function(function: Any, args: tuple[Any, ...], named: Mapping[str, Any], number: int, trace: Trace) -> Any:
    """Return the results of ``function.apply(*args, **named)``; trace its backward as the derivative ``number``.

    As in autograd, named arguments get no gradient. If backward would see at which outputs no gradient arrives, it is
    traced when that is known.
    """
    needs = tuple(torch.is_grad_enabled() and needs_gradient(x) for x in args)
    call = _FunctionCall(function, args, tuple(map(_constant, args)), needs, _Context(needs), number, trace)
    result = call.run_forward(named)
    if not any(needs):
        return result
    outputs = result if isinstance(result, tuple) else (result,)
    places = _differentiable_places(call.ctx, outputs)
    absent = {place: not call.ctx.materialize_grads and trace.absent(number, place) for place in places}
    arrives = {place: not is_absent for place, is_absent in absent.items()}
    values, tangents = _with_tangents(call.ctx, outputs, arrives)
    inputs, tokens = list[int](), list[Tensor]()
    if None not in absent.values() and (any(arrives.values()) or not places):
        inputs, tokens = call.run_backward(tangents)
    if not places:
        return result
    results = call.with_gradients(values, places, inputs, tokens)
    call.keep_memory(outputs, results, places)
    return tuple(results) if isinstance(result, tuple) else results[0]


@dataclass(frozen=True)
class _FunctionCall:
    """A call of a ``torch.autograd.Function`` in a trace.

    Attributes:
        function: The Function.
        args: The arguments.
        constants: The arguments, detached, as its forward gets them.
        needs: For each argument, whether it needs a gradient.
        ctx: The context.
        number: The number of the derivative.
        trace: The trace.
    """

    function: Any
    args: tuple[Any, ...]
    constants: tuple[Any, ...]
    needs: tuple[bool, ...]
    ctx: _Context
    number: int
    trace: Trace

    @property
    def _name(self) -> str:
        return f"torch.autograd.Function {self.function.__name__}"

    def run_forward(self, named: Mapping[str, Any]) -> Any:
        """Return the result of forward. If the Function keeps a constant, inner gradients treat it as the argument."""
        for x, constant in zip(self.args, self.constants, strict=True):
            if constant is not x:
                self.trace.inner.treat_as(constant, x)
        named_constants = {key: _constant(x) for key, x in named.items()}
        result = _run_forward(self.function, self.ctx, self.constants, named_constants)
        outputs = result if isinstance(result, tuple) else (result,)
        if any(all(x is not out for out in outputs) for x in self.ctx.dirty_tensors):
            self.trace.refuse(f"{self._name}, which does not return what it marks as dirty,")
        return result

    def run_backward(self, tangents: Sequence[Tensor | None]) -> tuple[list[int], list[Tensor]]:
        """Return which arguments get a gradient, and tokens of all gradients: also those added to parameters."""
        with torch.no_grad(), self.trace.inner.accumulating() as accumulated, of_backward(self.number):
            returned = _run_backward(self.function, self.ctx, tangents)
        gradients = {i: g for i, g in enumerate(returned[: len(self.args)]) if self.needs[i] and g is not None}
        tokens = [self._token(self.args[i], g, f"the gradient of input {i}") for i, g in gradients.items()]
        tokens += [self._token(x, g, "what it adds to the gradient of a parameter") for x, g in accumulated]
        return list(gradients), tokens

    def _token(self, x: Tensor, gradient: Any, what: str) -> Tensor:
        return declared(x, gradient, f"{self._name}: {what}", self.trace.refuse)

    def with_gradients(
        self, values: Sequence[Any], places: Sequence[int], inputs: Sequence[int], tokens: list[Tensor]
    ) -> list[Any]:
        """Return the results for the outputs ``values``: those at ``places`` have gradients, which go to ``inputs``."""
        ends = tuple(after_gradients(values[i], tokens) if tokens else values[i].detach() for i in places)
        sources = [self.args[i] for i in inputs or range(len(self.args)) if self.needs[i]]
        results = list(values)
        for place, x in zip(places, joined_to(self.number, ends, places, sources, self.trace.refuse), strict=True):
            results[place] = x
        return results

    def keep_memory(self, outputs: Sequence[Any], results: list[Any], places: Sequence[int]) -> None:
        """Write results to dirty arguments; forbid changes of others with their memory, and of what backward reads."""
        for place, out in enumerate(outputs):
            for x, constant in zip(self.args, self.constants, strict=True):
                if out is constant and any(out is dirty for dirty in self.ctx.dirty_tensors):
                    results[place] = x.copy_(results[place])  # the same tensor, with the history of the result
                elif place in places and isinstance(x, Tensor) and storage_key(x) == storage_key(out):
                    for tensor in (x, results[place]):  # in a program they have different memory
                        what = f"what {self._name} was given, and returns as it is or as a view,"
                        self.trace.forbid_changes(tensor, what)
        for x in pytree.tree_leaves(vars(self.ctx)):
            if isinstance(x, Tensor):
                self.trace.forbid_changes(x, f"what {self._name} keeps for its backward")


def _run_forward(function: Any, ctx: _Context, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Return the result of a Function's forward on detached inputs."""
    with torch.no_grad():
        if function.setup_context is FunctionBase.setup_context:
            return function.forward(ctx, *args, **named)
        result = function.forward(*args, **named)
        function.setup_context(ctx, args, result)
    return result


def _differentiable_places(ctx: _Context, outputs: Sequence[Any]) -> list[int]:
    excluded = {id(x) for x in ctx.non_differentiable}
    return [place for place, x in enumerate(outputs) if _differentiable(x) and id(x) not in excluded]


def _with_tangents(
    ctx: _Context, outputs: Sequence[Any], arrives: Mapping[int, bool]
) -> tuple[list[Any], list[Tensor | None]]:
    """Return outputs and their gradients. ``arrives``: for differentiable outputs, whether one arrives."""
    values: list[Any] = list(outputs)
    tangents: list[Tensor | None] = []
    for place, x in enumerate(outputs):
        if arrives.get(place):
            values[place], tangent = with_tangent(x.detach(), ctx.materialize_grads)
            tangents.append(tangent)
        elif place in arrives or not (isinstance(x, Tensor) and ctx.materialize_grads):
            tangents.append(None)
        else:
            tangents.append(torch.zeros_like(x))
    return values, tangents


def _run_backward(function: Any, ctx: _Context, tangents: Sequence[Tensor | None]) -> list[Any]:
    """Return the gradients that a Function's backward returns, as a list."""
    backward = function.backward if function.vjp is FunctionBase.vjp else function.vjp
    returned = backward(ctx, list(tangents)) if takes_gradients_as_list(function) else backward(ctx, *tangents)
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


def follow_hook(x: Tensor, hook: Callable[[Tensor], Any], number: int, what: str, refuse: Refuse) -> None:
    """Trace ``hook`` as the derivative of ``x``; :func:`.tensor_hooks.place_hooks` puts it in front of all users."""
    value, tangent = with_tangent(x.detach(), True)
    with torch.no_grad(), of_backward(number):
        gradient = hook(tangent)
    if gradient is None:
        refuse(f"{what} that returns nothing (it would run while tracing only): it")
    if not isinstance(gradient, Tensor) or tuple(gradient.shape) != tuple(x.shape):
        refuse(f"{what} that returns another shape: it")
    hooked(value, [declared(x, gradient, what, refuse)], number)


def joined_to(
    number: int, outputs: tuple[Tensor, ...], places: Sequence[int], inputs: Sequence[Tensor], refuse: Refuse
) -> tuple[Tensor, ...]:
    """Return ``outputs`` as results of derivative ``number``, with gradients as if computed from ``inputs``."""
    joined: tuple[Tensor, ...] = Joined.apply(number, places, refuse, outputs, *inputs)  # type: ignore[no-untyped-call]
    return joined


def _differentiable(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def declared(x: Tensor, gradient: Any, what: str, refuse: Refuse) -> Tensor:
    """Declare ``gradient`` that of ``x``, for :data:`..ops.derivatives.user_derivatives.after_gradients`."""
    if not isinstance(gradient, Tensor):
        refuse(f"{what} is no tensor: it")
    if tuple(gradient.shape) != tuple(x.shape):
        try:
            gradient = gradient.sum_to_size(x.shape)
        except RuntimeError:
            refuse(f"{what} has the shape {tuple(gradient.shape)}, not {tuple(x.shape)}: it")
    if gradient.dtype != x.dtype:
        gradient = gradient.to(x.dtype)
    done: Tensor = declare_gradient(x, gradient)[0]
    return done
