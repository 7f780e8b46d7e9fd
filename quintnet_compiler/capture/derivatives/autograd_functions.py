"""``torch.autograd.Function`` while it is traced: its forward and its backward become nodes of one graph."""

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
    """What a Function keeps from its forward to its backward."""

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
    """Outputs that need gradients while tracing goes on, as those of the user's Function do."""

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


def follow(
    function: Any,
    args: tuple[Any, ...],
    named: Mapping[str, Any],
    number: int,
    absent: Callable[[int], bool | None],
    settled: Callable[[Tensor, str], None],
    refuse: Refuse,
    inner: InnerGradients,
) -> Any:
    """What ``function.apply(*args, **named)`` returns; its backward is traced as the derivative ``number``. As in
    autograd, what has a name gets no gradient.

    ``absent``: whether no gradient arrives at this output; None if that is not known yet, then a backward that would
    see it is not traced. ``settled``: told of tensors that must not change in place afterwards, and what each is.
    ``refuse`` raises an error about what it is given. ``inner``: told of each input behind ``detach``, and of the
    input itself: what the Function keeps of the former is the latter for ``torch.autograd.grad``.
    """
    needs = tuple(torch.is_grad_enabled() and needs_gradient(x) for x in args)
    name = f"torch.autograd.Function {function.__name__}"
    ctx = _Context(needs)
    given = tuple(_constant(x) for x in args)
    others = {name: _constant(x) for name, x in named.items()}
    for x, constant in zip(args, given, strict=True):
        if constant is not x:
            inner.stand_in(constant, x)
    with torch.no_grad():
        if function.setup_context is FunctionBase.setup_context:
            made = function.forward(ctx, *given, **others)
        else:
            made = function.forward(*given, **others)
            function.setup_context(ctx, given, made)
    outputs = made if isinstance(made, tuple) else (made,)
    if any(all(x is not out for out in outputs) for x in ctx.dirty_tensors):
        refuse(f"{name}, which does not return what it marks as dirty,")
    if not any(needs):
        return made
    constant = {id(x) for x in ctx.non_differentiable}
    grown = [_differentiable(x) and id(x) not in constant for x in outputs]
    places = [place for place, ok in enumerate(grown) if ok]
    arrives = {place: ctx.materialize_grads or not absent(place) for place in places}
    waits = not ctx.materialize_grads and any(absent(place) is None for place in places)
    values: list[Any] = list(outputs)
    tangents: list[Any] = []
    for place, x in enumerate(outputs):
        if grown[place] and arrives[place]:
            values[place], tangent = with_tangent(x.detach(), ctx.materialize_grads)
            tangents.append(tangent)
        elif grown[place]:
            tangents.append(None)
        else:
            zeros = isinstance(x, Tensor) and ctx.materialize_grads
            tangents.append(torch.zeros_like(x) if zeros else None)
    backward = function.backward if function.vjp is FunctionBase.vjp else function.vjp
    found: Any = ()
    accumulated: list[tuple[Tensor, Tensor]] = []
    if not waits and (any(arrives.values()) or not places):
        with torch.no_grad(), inner.accumulating() as accumulated, of_backward(number):
            found = backward(ctx, list(tangents)) if takes_gradients_as_list(function) else backward(ctx, *tangents)
    gradients = list(found) if isinstance(found, (tuple, list)) else [found]
    gradients += [None] * (len(args) - len(gradients))
    grads = {i: g for i, g in enumerate(gradients) if i < len(args) and needs[i] and g is not None}
    done = [declared(args[i], g, f"{name}: the gradient of input {i}", refuse) for i, g in grads.items()]
    done += [declared(x, g, f"{name}: what it adds to the gradient of a parameter", refuse) for x, g in accumulated]
    if not places:
        return made
    ends = [after_gradients(values[i], done) if done else values[i].detach() for i in places]
    inputs = [args[i] for i in grads or range(len(args)) if needs[i]]
    joined = iter(joined_to(number, tuple(ends), places, inputs, refuse))
    results = [next(joined) if ok else x for x, ok in zip(values, grown, strict=True)]
    for place, out in enumerate(outputs):
        for x, before in zip(args, given, strict=True):
            if out is before and any(out is dirty for dirty in ctx.dirty_tensors):
                results[place] = x.copy_(results[place])  # the same tensor, with the history of the result
            elif grown[place] and isinstance(x, Tensor) and storage_key(x) == storage_key(out):
                for one in (x, results[place]):  # a program gives them memory of their own
                    settled(one, f"what {name} was given, and returns as it is or as a view,")
    for x in pytree.tree_leaves(vars(ctx)):
        if isinstance(x, Tensor):
            settled(x, f"what {name} keeps for its backward")
    return tuple(results) if isinstance(made, tuple) else results[0]


def follow_hook(x: Tensor, hook: Callable[[Tensor], Any], number: int, what: str, refuse: Refuse) -> None:
    """Trace ``hook`` as the derivative of ``x``; :func:`.tensor_hooks.place_hooks` puts it in front of all users."""
    value, tangent = with_tangent(x.detach(), True)
    with torch.no_grad(), of_backward(number):
        found = hook(tangent)
    if found is None:
        refuse(f"{what} that returns nothing (it would run while tracing only): it")
    if not isinstance(found, Tensor) or tuple(found.shape) != tuple(x.shape):
        refuse(f"{what} that returns another shape: it")
    hooked(value, [declared(x, found, what, refuse)], number)


def joined_to(
    number: int, outputs: tuple[Tensor, ...], places: Sequence[int], inputs: Sequence[Tensor], refuse: Refuse
) -> tuple[Tensor, ...]:
    """``outputs``, which need gradients as if ``inputs`` made them: results ``places`` of derivative ``number``."""
    found: tuple[Tensor, ...] = Joined.apply(number, places, refuse, outputs, *inputs)  # type: ignore[no-untyped-call]
    return found


def _differentiable(x: Any) -> bool:
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def declared(x: Tensor, gradient: Any, what: str, refuse: Refuse) -> Tensor:
    """Says that ``gradient`` is that of ``x``: for :data:`..ops.derivatives.user_derivatives.after_gradients`."""
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
