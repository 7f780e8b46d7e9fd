"""``gradient`` of a captured graph (:mod:`...ops.derivatives.inner_gradients`), as the operators of a backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ...core.absent_gpu import CPU, AbsentGpu, on_device
from ...core.annotations import facts, is_getitem, origin, value
from ...core.errors import CompileError, QuintNetError
from ...ir.builder import GraphBuilder
from ...ops.attention.cuda import on_gpu
from ...ops.derivatives.inner_gradients import start
from ...ops.derivatives.user_derivatives import after_gradients, declare_gradient, with_tangent
from ...ops.rank_local import dropout
from ..autodiff.operator_trace import trace
from .twice_differentiable import TWICE_DIFFERENTIABLE

aten = torch.ops.aten
Copy = Callable[[fx.Node, dict[fx.Node, Any]], Any]


def inner_gradient(
    builder: GraphBuilder,
    outputs: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    arriving: Sequence[fx.Node],
    again: bool,
    copy: Copy,
    absent: AbsentGpu | None,
) -> list[fx.Node]:
    """The gradients of ``outputs`` with respect to ``inputs``, of which each is
    :data:`...ops.derivatives.inner_gradients.start`, of what the builder's graph computes between them: autograd's own,
    traced over these operators.

    ``arriving``: those of the outputs; ``again``: whether the results may be differentiated. ``copy(part, env)``
    appends an operator of the trace, whose inputs are in ``env``.

    Raises:
        CompileError: QN105 for a derivative that is the user's own; QN109 for an operator that autograd cannot trace.
    """
    path = _between(builder.graph, inputs, outputs)
    for node in path:
        if node.target in (with_tangent, declare_gradient, after_gradients):
            what = "through a derivative that is your own, or what forward changes in place where gradients are off,"
            message = f"torch.autograd.grad in forward, {what} would not be part of the program"
            raise CompileError("QN105", message, where=facts(node).where)
    given = list(dict.fromkeys(x for n in path for x in n.all_input_nodes if x not in path or n in inputs))
    ends = [n for n in path if not isinstance(facts(n).value, tuple)]

    def forward(*tensors: Tensor) -> list[Tensor]:
        env: dict[fx.Node, Any] = dict(zip(given, tensors, strict=False))
        moved = dict(zip(inputs, tensors[len(given) :], strict=True))
        for node in path:
            env[node] = _run(node, env, absent)
            if node in moved:  # its gradient is that of something added to it
                env[node] = env[node] + moved[node]
        return [env[n] for n in ends]

    wanted = [ends.index(out) for out in outputs if out in path]
    tensors = [*given, *inputs]
    asked = [False] * len(given) + [True] * len(inputs)
    try:
        found = trace(forward, tensors, {}, tensors, wanted, builder.mode, absent, asked=asked, again=again)
    except QuintNetError:
        raise
    except Exception as error:
        text = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"
        message = f"torch.autograd.grad in forward cannot be traced: {text}"
        raise CompileError("QN109", message, where=builder.where) from error
    env: dict[fx.Node, Any] = dict(zip(found.inputs, given, strict=False))
    if found.dense or found.even:
        env = {place: builder.call(aten.contiguous.default, x) for place, x in env.items()}
    for made, node in zip(found.outputs, ends, strict=True):
        if made is not None:
            env.setdefault(made, node)
    arrives = dict(enumerate(arriving))
    reached = [i for i, out in enumerate(outputs) if out in path]
    for place, i in zip(found.tangents, reached, strict=True):
        x = value(outputs[i])
        one = arrives.get(i)
        env[place] = (
            builder.call(aten.full.default, list(x.shape), 1.0, dtype=x.dtype, device=x.device) if one is None else one
        )
    results, before = found.gradients[len(given) :], len(builder.made)
    for part in _needed(found.graph, [g for g in results if g is not None], env):
        if part.target is aten.contiguous.default:  # kernels of a backward may ask for it
            env[part] = builder.call(aten.contiguous.default, env[part.all_input_nodes[0]])
        else:
            env[part] = copy(part, env)
    if again:
        _check_saved(builder, builder.made[before:])
    ends_of = [None if g is None else env[g] for g in results]
    return [_end(builder, g, x, again) for g, x in zip(ends_of, inputs, strict=True)]


def _check_saved(builder: GraphBuilder, made: Sequence[fx.Node]) -> None:
    """Some operators give numbers to their backward that autograd takes for constants, as the backward's own derivative
    knows how they change; in a program, each operator is differentiated on its own.

    Raises:
        CompileError: QN109 where such a number is left.
    """
    for node in made:
        if is_getitem(node) and facts(node).needs_grad and not _has_derivative(builder, *origin(node)):
            what = f"the derivative of a derivative needs {origin(node)[0].target} as simpler operators"
            raise CompileError("QN109", what, where=builder.where, fix="write that operator out in the model")


def _has_derivative(builder: GraphBuilder, node: fx.Node, place: int) -> bool:
    """Whether autograd follows this result of an operator."""
    leaves: list[Tensor] = []

    def leaf(x: fx.Node) -> Tensor:
        known = value(x)
        flows = known.is_floating_point() or known.is_complex()
        leaves.append(torch.empty_like(known, device=CPU, requires_grad=flows))
        return leaves[-1]

    target: Any = node.target
    with builder.mode, torch.enable_grad():
        args, kwargs = fx.map_arg((node.args, node.kwargs), leaf)
        made = target(*args, **kwargs)[place]
        if not made.requires_grad:
            return False
        asked = [x for x in leaves if x.requires_grad]
        found = torch.autograd.grad(made, asked, torch.ones_like(made), allow_unused=True)
    return any(x is not None for x in found)


def _end(builder: GraphBuilder, found: fx.Node | None, x: fx.Node, again: bool) -> fx.Node:
    if found is None:
        like = value(x)
        return builder.call(aten.full.default, list(like.shape), 0.0, dtype=like.dtype, device=like.device)
    return found if again or not facts(found).needs_grad else builder.call(aten.detach.default, found)


def without_starts(graph: fx.Graph) -> None:
    """Once all gradients are written out, a ``start`` is what it starts from."""
    for node in graph.find_nodes(op="call_function", target=start):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


def _between(graph: fx.Graph, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> list[fx.Node]:
    """What a gradient goes through from ``outputs`` to ``inputs``, in order."""
    reached = set(inputs)
    for node in graph.nodes:
        flows = node.op == "call_function" and node.target is not aten.detach.default
        if flows and any(x in reached for x in node.all_input_nodes) and _differentiable(node):
            reached.add(node)
    found, todo = set[fx.Node](), [n for n in outputs if n in reached]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [x for x in node.all_input_nodes if x in reached]
    return [n for n in graph.nodes if n in found]


def _differentiable(node: fx.Node) -> bool:
    if declare_gradient in (node.target, is_getitem(node) and origin(node)[0].target):
        return True  # it says where a gradient goes
    known = facts(node).value
    parts = known if isinstance(known, tuple) else (known,)
    return any(isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) for x in parts)


def _run(node: fx.Node, env: dict[fx.Node, Any], absent: AbsentGpu | None) -> Any:
    args: Any
    args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
    target: Any = node.target
    if target is start:
        return args[0]
    if target in TWICE_DIFFERENTIABLE:
        return TWICE_DIFFERENTIABLE[target](*args, **kwargs)
    if target is dropout:  # linear: the mask is what it makes of ones
        return args[0] * dropout(torch.ones_like(args[0].detach()), *args[1:], **kwargs)
    if absent is not None and not is_getitem(node):
        target, (args, kwargs) = on_gpu(target, absent), on_device((args, kwargs), CPU)
    return target(*args, **kwargs)


def _needed(graph: fx.Graph, ends: Sequence[fx.Node], env: dict[fx.Node, Any]) -> list[fx.Node]:
    """What must be computed for ``ends``, where ``env`` is there already."""
    found, todo = set[fx.Node](), list(ends)
    while todo:
        node = todo.pop()
        if node not in found and node not in env:
            found.add(node)
            todo += node.all_input_nodes
    assert not any(node.op == "placeholder" for node in found), "what was added to an input has no value"
    return [node for node in graph.nodes if node in found]
