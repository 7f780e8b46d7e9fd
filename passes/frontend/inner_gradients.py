"""``gradient`` in a captured graph (:mod:`...ops.derivatives.inner_gradients`), as the operators of a backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ...core.absent_gpu import CPU, AbsentGpu, on_device
from ...core.annotations import facts, is_getitem, origin, value
from ...core.errors import CompileError, QuintNetError
from ...ir.builder import GraphBuilder
from ...ops.attention.cuda import on_gpu
from ...ops.catalog import op_spec
from ...ops.derivatives.inner_gradients import start
from ...ops.derivatives.operator_trace import Template, trace
from ...ops.rank_local import dropout
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
    """Emit the gradients of ``outputs`` with respect to ``inputs``, traced by autograd.

    The trace is of what the builder's graph computes between them. Each input is
    :data:`...ops.derivatives.inner_gradients.start`. ``arriving``: the gradients of the outputs; ``again``: whether the
    results may be differentiated. ``copy(part, env)`` appends an operator of the trace, whose inputs are in ``env``.

    Raises:
        CompileError: QN105 for a user's own derivative; QN109 for an operator that autograd cannot trace.
    """
    path = _Path(builder, _between(builder.graph, inputs, outputs), inputs, absent)
    path.refuse_user_derivatives()
    template = path.trace_backward(outputs, again)
    env = _inputs_of_trace(builder, template, path)
    env |= _tangents(builder, template, [out for out in outputs if out in path.nodes], outputs, arriving)
    first_new = len(builder.made)
    gradients = template.gradients[len(path.sources) :]
    for part in _needed(template.graph, [g for g in gradients if g is not None], env):
        if op_spec(part).relayouts:  # kernels of a backward may ask for it
            env[part] = builder.call(aten.contiguous.default, env[part.all_input_nodes[0]])
        else:
            env[part] = copy(part, env)
    if again:
        _check_saved(builder, builder.made[first_new:])
    results = [None if g is None else env[g] for g in gradients]
    return [_result(builder, g, x, again) for g, x in zip(results, inputs, strict=True)]


@dataclass(frozen=True)
class _Path:
    """The nodes that a gradient flows through to ``inputs``, in order."""

    builder: GraphBuilder
    nodes: Sequence[fx.Node]
    inputs: Sequence[fx.Node]
    absent: AbsentGpu | None

    @property
    def sources(self) -> list[fx.Node]:
        """Return the values that the path reads."""
        inside, sources = set(self.nodes), dict[fx.Node, None]()
        for node in self.nodes:
            starts = node in self.inputs
            sources |= {x: None for x in node.all_input_nodes if starts or x not in inside}
        return list(sources)

    @property
    def tensor_nodes(self) -> list[fx.Node]:
        """Return the nodes of the path whose values are tensors."""
        return [node for node in self.nodes if not isinstance(facts(node).value, tuple)]

    def refuse_user_derivatives(self) -> None:
        """Raise CompileError if the path has a derivative that is the user's own."""
        for node in self.nodes:
            if op_spec(node).user_derivative is not None:
                description = (
                    "through a derivative that is your own, or what forward changes in place where gradients are off,"
                )
                message = f"torch.autograd.grad in forward, {description} would not be part of the program"
                raise CompileError("QN105", message, where=facts(node).where)

    def trace_backward(self, outputs: Sequence[fx.Node], again: bool) -> Template:
        """Trace the path and its backward. Inputs of the trace: the sources, then something added to each input.

        Raises:
            CompileError: QN109 if autograd cannot trace an operator.
        """
        sources, results = self.sources, self.tensor_nodes
        wanted = [results.index(out) for out in outputs if out in self.nodes]
        tensors = [*sources, *self.inputs]
        asked = [False] * len(sources) + [True] * len(self.inputs)
        mode = self.builder.mode
        try:
            return trace(self._forward, tensors, {}, tensors, wanted, mode, self.absent, asked=asked, again=again)
        except QuintNetError:
            raise
        except Exception as error:
            text = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"
            message = f"torch.autograd.grad in forward cannot be traced: {text}"
            raise CompileError("QN109", message, where=self.builder.where) from error

    def _forward(self, *tensors: Tensor) -> list[Tensor]:
        """Run the path. The gradient of an input is that of a tensor that is added to it."""
        sources = self.sources
        env: dict[fx.Node, Any] = dict(zip(sources, tensors, strict=False))
        added = dict(zip(self.inputs, tensors[len(sources) :], strict=True))
        for node in self.nodes:
            env[node] = _run(node, env, self.absent)
            if node in added:
                env[node] = env[node] + added[node]
        return [env[node] for node in self.tensor_nodes]


def _inputs_of_trace(builder: GraphBuilder, template: Template, path: _Path) -> dict[fx.Node, Any]:
    """Return the builder's nodes for the trace's inputs and for results that the builder's graph has already."""
    env: dict[fx.Node, Any] = dict(zip(template.inputs, path.sources, strict=False))
    if template.dense or template.even:
        env = {placeholder: builder.call(aten.contiguous.default, x) for placeholder, x in env.items()}
    for part, node in zip(template.outputs, path.tensor_nodes, strict=True):
        if part is not None:
            env.setdefault(part, node)
    return env


def _tangents(
    builder: GraphBuilder,
    template: Template,
    reached: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    arriving: Sequence[fx.Node],
) -> dict[fx.Node, Any]:
    """Return the gradients of the ``reached`` outputs for the trace: those that arrive, or ones."""
    arrives = dict(enumerate(arriving))
    positions = [i for i, out in enumerate(outputs) if out in reached]
    env: dict[fx.Node, Any] = {}
    for placeholder, i in zip(template.tangents, positions, strict=True):
        like, tangent = value(outputs[i]), arrives.get(i)
        if tangent is None:
            tangent = builder.call(aten.full.default, list(like.shape), 1.0, dtype=like.dtype, device=like.device)
        env[placeholder] = tangent
    return env


def _check_saved(builder: GraphBuilder, new_nodes: Sequence[fx.Node]) -> None:
    """Raise CompileError if an operator gives its backward a number without a derivative.

    Autograd takes some numbers for constants, because the backward's own derivative knows how they change; in a
    program, each operator is differentiated by itself.

    Raises:
        CompileError: QN109 if there is such a number.
    """
    for node in new_nodes:
        if is_getitem(node) and facts(node).needs_grad and not _has_derivative(builder, *origin(node)):
            message = f"the derivative of a derivative needs {origin(node)[0].target} as simpler operators"
            raise CompileError("QN109", message, where=builder.where, fix="write that operator out in the model")


def _has_derivative(builder: GraphBuilder, node: fx.Node, output: int) -> bool:
    """Return whether autograd differentiates this result of an operator."""
    leaves: list[Tensor] = []

    def leaf(x: fx.Node) -> Tensor:
        like = value(x)
        flows = like.is_floating_point() or like.is_complex()
        leaves.append(torch.empty_like(like, device=CPU, requires_grad=flows))
        return leaves[-1]

    target: Any = node.target
    with builder.mode, torch.enable_grad():
        args, kwargs = fx.map_arg((node.args, node.kwargs), leaf)
        result = target(*args, **kwargs)[output]
        if not result.requires_grad:
            return False
        inputs = [x for x in leaves if x.requires_grad]
        gradients = torch.autograd.grad(result, inputs, torch.ones_like(result), allow_unused=True)
    return any(x is not None for x in gradients)


def _result(builder: GraphBuilder, gradient: fx.Node | None, x: fx.Node, again: bool) -> fx.Node:
    """Return the gradient of ``x``: zeros if there is none, and detached unless it may be differentiated."""
    if gradient is None:
        like = value(x)
        return builder.call(aten.full.default, list(like.shape), 0.0, dtype=like.dtype, device=like.device)
    return gradient if again or not facts(gradient).needs_grad else builder.call(aten.detach.default, gradient)


def without_starts(graph: fx.Graph) -> None:
    """Replace each ``start`` by its input, once all gradients are written out."""
    for node in graph.find_nodes(op="call_function", target=start):
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)


def _between(graph: fx.Graph, inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the nodes that a gradient flows through from ``outputs`` to ``inputs``, in order."""
    reached = set(inputs)
    for node in graph.nodes:
        flows = node.op == "call_function" and op_spec(node).detaches is None
        if flows and any(x in reached for x in node.all_input_nodes) and _differentiable(node):
            reached.add(node)
    path, todo = set[fx.Node](), [n for n in outputs if n in reached]
    while todo:
        node = todo.pop()
        if node not in path:
            path.add(node)
            todo += [x for x in node.all_input_nodes if x in reached]
    return [n for n in graph.nodes if n in path]


def _differentiable(node: fx.Node) -> bool:
    if op_spec(origin(node)[0]).user_derivative == "declaration":
        return True  # it says where a gradient goes
    result = facts(node).value
    tensors = result if isinstance(result, tuple) else (result,)
    return any(isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) for x in tensors)


def _run(node: fx.Node, env: dict[fx.Node, Any], absent: AbsentGpu | None) -> Any:
    args: Any
    args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
    target: Any = node.target
    if op_spec(node).inner_gradient == "start":
        return args[0]
    if target in TWICE_DIFFERENTIABLE:
        return TWICE_DIFFERENTIABLE[target](*args, **kwargs)
    if op_spec(node).random == "mask":  # linear: its result for ones is the mask
        return args[0] * dropout(torch.ones_like(args[0].detach()), *args[1:], **kwargs)
    if absent is not None and not is_getitem(node):
        target, (args, kwargs) = on_gpu(target, absent), on_device((args, kwargs), CPU)
    return target(*args, **kwargs)


def _needed(graph: fx.Graph, ends: Sequence[fx.Node], env: dict[fx.Node, Any]) -> list[fx.Node]:
    """Return the nodes that ``ends`` are computed from and that ``env`` does not have, in order."""
    needed, todo = set[fx.Node](), list(ends)
    while todo:
        node = todo.pop()
        if node not in needed and node not in env:
            needed.add(node)
            todo += node.all_input_nodes
    assert not any(node.op == "placeholder" for node in needed), "a tensor that is added to an input has no value"
    return [node for node in graph.nodes if node in needed]
