"""An operator and its backward as a graph, traced from autograd.

Kernels have preconditions on memory format, and autograd meets them: derivatives.yaml says ``grad.contiguous()`` where
a backward kernel reads its gradient as contiguous memory, and composite operators do so with their inputs. On a tensor
that is contiguous such a call leaves nothing in a trace, and the trace would be wrong for any other tensor. Therefore
operators are traced with tensors that are contiguous in no memory format. Where autograd makes a tensor contiguous, the
trace has a ``contiguous``, which costs nothing at run time if the tensor is contiguous already.

Autograd works on tensors of a device only where PyTorch has it (without, it ends the process). Operators for a GPU that
this machine does not have are traced on the CPU, with the operators that the GPU would run instead of those that
PyTorch chooses by device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from ...compat.torch import FakeTensorMode, schema_or_none
from ...compat.torch_codegen import forgotten_texts
from ...core.absent_gpu import CPU, CUDA, AbsentGpu, on_device
from ...core.annotations import facts, value
from ..attention.cuda import on_gpu
from ..catalog import op_spec
from .recording import record

aten = torch.ops.aten
_COPIES = (aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default)
_CUDNN_BACKWARD = aten._scaled_dot_product_cudnn_attention_backward.default
# These factorise a contiguous matrix transposed, and autograd knows when: the derivative has that format.
_BY_FORMAT = (aten._linalg_det.default, aten._linalg_slogdet.default, aten._linalg_solve_ex.default)


@dataclass(frozen=True)
class Template:
    """A traced operator: a graph of its forward and backward.

    Attributes:
        graph: Of both.
        inputs: Placeholders of tensors.
        tangents: Placeholders of the gradients of the outputs ``wanted``.
        outputs: Of the operator; None: it is no tensor.
        gradients: Of the inputs; None: there is none.
        forward: Nodes that run in the forward.
        wanted: The outputs that have a tangent.
        dense: Whether the trace holds for contiguous inputs and tangents alone.
        even: Positions of inputs whose last dim must have stride 1.
    """

    graph: fx.Graph
    inputs: tuple[fx.Node, ...]
    tangents: tuple[fx.Node, ...]
    outputs: tuple[fx.Node | None, ...]
    gradients: tuple[fx.Node | None, ...]
    forward: frozenset[fx.Node]
    wanted: tuple[int, ...]
    dense: bool
    even: frozenset[int]


def trace(
    target: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    tensors: list[fx.Node],
    wanted: Sequence[int],
    mode: FakeTensorMode,
    absent: AbsentGpu | None = None,
    *,
    asked: Sequence[bool] | None = None,
    again: bool = False,
) -> Template:
    """Trace ``target(*args, **kwargs)``, whose tensors are ``tensors``, and the pullback of its outputs ``wanted``.

    ``asked``: which tensors get a gradient; by default, those that need one. ``again``: the pullback consists of
    operators that autograd can differentiate again.
    """
    flags = tuple(facts(n).needs_grad for n in tensors) if asked is None else tuple(asked)
    call = _OperatorCall(target, args, kwargs, tensors, flags, wanted, mode, absent, again)
    try:
        template = call.traced(dense=False)
        if not any(op_spec(n).takes_strides or n.target in _BY_FORMAT for n in template.graph.nodes):
            return template
    except (RuntimeError, NotImplementedError, ValueError):
        pass  # views of complex numbers, for instance, need certain strides
    return call.traced(dense=True)


@dataclass(frozen=True)
class _OperatorCall:
    target: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]
    tensors: list[fx.Node]
    flags: Sequence[bool]
    wanted: Sequence[int]
    mode: FakeTensorMode
    absent: AbsentGpu | None
    again: bool

    def _run(self, tensors: list[Tensor]) -> list[Any]:
        source = iter(tensors)
        args, kwargs = fx.map_arg((tuple(self.args), self.kwargs), lambda _: next(source))
        target = self.target
        if self.absent is not None:
            target, (args, kwargs) = on_gpu(target, self.absent), on_device((args, kwargs), CPU)
        out = target(*args, **kwargs)
        return list(out) if isinstance(out, (tuple, list)) else [out]

    def _joint(self, takes: Callable[[Callable[[], Tensor]], Tensor], like: Callable[..., Tensor]) -> list[Any]:
        """Return outputs, then gradients of the tensors."""
        if self.absent is not None:
            like = partial(like, device=CPU)
        flags = self.flags
        # Values may be shared between nodes, and recording distinguishes its inputs by identity.
        leaves = [takes(partial(like, value(n))).requires_grad_(f) for n, f in zip(self.tensors, flags, strict=True)]
        with torch.enable_grad():
            outs = self._run(leaves)
        tangents = [takes(partial(like, outs[i])) for i in self.wanted]
        pairs = [(outs[i], t) for i, t in zip(self.wanted, tangents, strict=True) if outs[i].requires_grad]
        inputs = [x for x in leaves if x.requires_grad]
        ends, end_gradients = [out for out, _ in pairs], [tangent for _, tangent in pairs]
        gradients = iter(torch.autograd.grad(ends, inputs, end_gradients, create_graph=self.again, allow_unused=True))
        return [*outs, *(next(gradients) if flag else None for flag in flags)]

    def traced(self, *, dense: bool) -> Template:
        with self.mode, forgotten_texts():
            graph = record(lambda takes: self._joint(takes, _contiguous if dense else _spaced))
            if any(_mutable(node) for node in graph.nodes):
                # A node's value must never change, because nodes are shared.
                makers = [partial(node.meta.get, "val") for node in graph.find_nodes(op="placeholder")]
                pure = torch.func.functionalize(fx.GraphModule({}, graph), remove="mutations")
                with torch.no_grad():
                    graph = record(lambda takes: pure(*map(takes, makers)))
        if self.absent is not None:
            for node in graph.nodes:
                node.args, node.kwargs = on_device((node.args, node.kwargs), CUDA)
        _simplify(graph)
        with self.mode:
            _one_layout(graph)
        placeholders, count = graph.find_nodes(op="placeholder"), len(self.tensors)
        returned = [n if isinstance(n, fx.Node) else None for n in graph.output_node().args[0]]  # type: ignore[union-attr]
        split = len(returned) - count
        outputs = tuple(returned[:split])
        gradients = tuple(_following(node, placeholders[count:]) for node in returned[split:])
        forward = _ancestors(outputs)
        # Nodes that need no tangent belong to the forward only if the outputs need them; others, which the backward
        # derives from saved values, are computed in the backward.
        fused = {source for node in graph.nodes if _begins_fused(node) for source in node.args[:3]}
        return Template(
            graph,
            tuple(placeholders[:count]),
            tuple(placeholders[count:]),
            outputs,
            gradients,
            forward,
            tuple(self.wanted),
            dense,
            frozenset(i for i, placeholder in enumerate(placeholders[:count]) if placeholder in fused),
        )


def _spaced(x: Tensor, device: torch.device | None = None) -> Tensor:
    """Return a tensor like ``x`` that is contiguous in no memory format: a slice of a larger one.

    Its last dim has stride 1 wherever another dim makes it a slice: fused attention is for such tensors alone.
    """
    wide = [dim for dim, size in enumerate(x.shape) if size > 1]
    step = 2 if len(wide) == 1 else 1
    strides: list[int] = []
    for dim in reversed(range(x.dim())):
        strides.append(step)
        step *= max(x.shape[dim], 1) * (2 if len(wide) > 1 and dim == wide[-1] else 1)
    return torch.empty_strided(x.shape, strides[::-1], dtype=x.dtype, device=device or x.device)


def _contiguous(x: Tensor, device: torch.device | None = None) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format, device=device or x.device)


def _mutable(node: fx.Node) -> bool:
    schema = schema_or_none(node.target)
    return schema is not None and schema.is_mutable


def _begins_fused(node: fx.Node) -> bool:
    """Return whether a node is the forward of fused attention, whose inputs must have neighbours in their rows."""
    attention = op_spec(node).attention
    return attention is not None and attention.fused and not attention.backward


def _simplify(graph: fx.Graph) -> None:
    """Remove copies; where memory format matters, leave ``contiguous``."""
    for node in list(graph.nodes):
        if op_spec(node).clones:
            format_ = node.kwargs.get("memory_format")
            if format_ in (None, torch.preserve_format):
                node.replace_all_uses_with(node.args[0])
            elif format_ is torch.contiguous_format and all(op_spec(user).reshapes for user in node.users):
                node.replace_all_uses_with(node.args[0])  # they become reshapes, which copy where they have to
            else:
                node.target = aten.contiguous.default
                node.kwargs = {} if format_ is torch.contiguous_format else node.kwargs
        elif node.target in _COPIES:
            node.replace_all_uses_with(node.args[0])
    graph.eliminate_dead_code()
    graph.lint()


def _one_layout(graph: fx.Graph) -> None:
    """Lay out the gradient of cuDNN's attention in the usual order of memory, [B, S, H, D].

    PyTorch caches the plans of cuDNN by the shapes and strides of queries, keys and values alone
    (``aten/src/ATen/native/cudnn/MHA.cpp``, PyTorch 2.13). With gradients of other strides, a plan that was made for an
    earlier call, of this program or of anything else in the process, reads other memory and gives wrong gradients.
    """
    transpose = (aten.transpose.int, (1, 2))
    for node in list(graph.nodes):
        if node.target is _CUDNN_BACKWARD:
            grad = node.args[0]
            with graph.inserting_before(node):
                for target, args in (transpose, (aten.contiguous.default, ()), transpose):
                    moved = graph.call_function(target, (grad, *args))
                    moved.meta["val"] = target(grad.meta["val"], *args)
                    grad = moved
            node.args = (grad, *node.args[1:])


def _following(gradient: fx.Node | None, tangents: Sequence[fx.Node]) -> fx.Node | None:
    """Return a gradient, or zeros made from a tangent if it depends on none: gradients are linear in tangents."""
    if gradient is None or gradient in tangents or not _ancestors([gradient]).isdisjoint(_users(tangents)):
        return gradient
    zero: Tensor = gradient.meta["val"]
    with gradient.graph.inserting_before(gradient.graph.output_node()):
        return gradient.graph.call_function(
            aten.new_zeros.default, (tangents[0], list(zero.shape)), {"dtype": zero.dtype}
        )


def _users(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    return {user for node in nodes for user in node.users}


def _ancestors(outputs: Sequence[fx.Node | None]) -> frozenset[fx.Node]:
    ancestors: set[fx.Node] = set()
    todo = [n for n in outputs if n is not None]
    while todo:
        node = todo.pop()
        if node.op == "call_function" and node not in ancestors:
            ancestors.add(node)
            todo += node.all_input_nodes
    return frozenset(ancestors)
