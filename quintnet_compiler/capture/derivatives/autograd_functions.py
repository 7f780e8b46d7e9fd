"""Trace ``torch.autograd.Function``: its forward and its backward become nodes of one graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ...compat.torch import pytree, storage_key
from ...compat.torch_func import nodes_of_trace
from ...compat.torch_hooks import FunctionBase, takes_gradients_as_list
from ...ops.derivatives.user_derivatives import after_gradients, declare_gradient, hooked, with_tangent
from ..changes.backward_writes import BACKWARD
from .inner_gradients import InnerGradients

Refuse = Callable[[str], Any]


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


def trace_function(
    function: Any,
    args: tuple[Any, ...],
    named: Mapping[str, Any],
    number: int,
    absent: Callable[[int], bool | None],
    settled: Callable[[Tensor, str], None],
    refuse: Refuse,
    inner: InnerGradients,
) -> Any:
    """Return the results of ``function.apply(*args, **named)``; trace its backward as the derivative ``number``.

    As in autograd, named arguments get no gradient.

    ``absent``: returns whether no gradient arrives at an output, or None if that is not known yet; then a backward that
    would see it is not traced. ``settled``: called with tensors that must not change in place afterwards, and a
    description. ``refuse``: raises an error about a construct. ``inner``: records each input and its detached copy: if
    the Function keeps the copy, ``torch.autograd.grad`` treats it as the input.
    """
    needs = tuple(torch.is_grad_enabled() and needs_gradient(x) for x in args)
    name = f"torch.autograd.Function {function.__name__}"
    ctx = _Context(needs)
    constants = tuple(_constant(x) for x in args)
    for x, constant in zip(args, constants, strict=True):
        if constant is not x:
            inner.treat_as(constant, x)
    result = _run_forward(function, ctx, constants, {key: _constant(x) for key, x in named.items()})
    outputs = result if isinstance(result, tuple) else (result,)
    if any(all(x is not out for out in outputs) for x in ctx.dirty_tensors):
        refuse(f"{name}, which does not return what it marks as dirty,")
    if not any(needs):
        return result
    non_differentiable = {id(x) for x in ctx.non_differentiable}
    grown = [_differentiable(x) and id(x) not in non_differentiable for x in outputs]
    places = [place for place, ok in enumerate(grown) if ok]
    arrives = {place: ctx.materialize_grads or not absent(place) for place in places}
    waits = not ctx.materialize_grads and any(absent(place) is None for place in places)
    values, tangents = _with_tangents(ctx, outputs, arrives)
    gradients: Sequence[Any] = ()
    accumulated: list[tuple[Tensor, Tensor]] = []
    if not waits and (any(arrives.values()) or not places):
        with torch.no_grad(), inner.accumulating() as accumulated, of_backward(number):
            gradients = _run_backward(function, ctx, tangents)
    grads = {i: g for i, g in enumerate(gradients[: len(args)]) if needs[i] and g is not None}
    done = [declared(args[i], g, f"{name}: the gradient of input {i}", refuse) for i, g in grads.items()]
    done += [declared(x, g, f"{name}: what it adds to the gradient of a parameter", refuse) for x, g in accumulated]
    if not places:
        return result
    ends = [after_gradients(values[i], done) if done else values[i].detach() for i in places]
    inputs = [args[i] for i in grads or range(len(args)) if needs[i]]
    joined = iter(joined_to(number, tuple(ends), places, inputs, refuse))
    results = [next(joined) if ok else x for x, ok in zip(values, grown, strict=True)]
    for place, out in enumerate(outputs):
        for x, constant in zip(args, constants, strict=True):
            if out is constant and any(out is dirty for dirty in ctx.dirty_tensors):
                results[place] = x.copy_(results[place])  # the same tensor, with the history of the result
            elif grown[place] and isinstance(x, Tensor) and storage_key(x) == storage_key(out):
                for tensor in (x, results[place]):  # in a program they have different memory
                    settled(tensor, f"what {name} was given, and returns as it is or as a view,")
    for x in pytree.tree_leaves(vars(ctx)):
        if isinstance(x, Tensor):
            settled(x, f"what {name} keeps for its backward")
    return tuple(results) if isinstance(result, tuple) else results[0]


def _run_forward(function: Any, ctx: _Context, args: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Return the result of a Function's forward on detached inputs."""
    with torch.no_grad():
        if function.setup_context is FunctionBase.setup_context:
            return function.forward(ctx, *args, **named)
        result = function.forward(*args, **named)
        function.setup_context(ctx, args, result)
    return result


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
