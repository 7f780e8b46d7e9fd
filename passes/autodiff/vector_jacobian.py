"""The backward of one operator as graph nodes.

Each operator is differentiated on its own, by tracing autograd over it (:mod:`...ops.derivatives.operator_trace`), and
the trace is reused for every operator with the same arguments and shapes: repeated blocks cost nothing, and every
backward node knows which line of the user's model it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ...core.absent_gpu import CUDA, AbsentGpu
from ...core.annotations import facts, shape, value
from ...ir.builder import GraphBuilder
from ...ops.attention.tiled import tiled_attention, tiled_attention_backward
from ...ops.catalog import op_spec, spec_of
from ...ops.collectives import ring_attention, ring_attention_backward
from ...ops.cross_entropy import nll_terms, nll_terms_backward
from ...ops.derivatives.operator_trace import Template, trace
from ...ops.experts.grouped_rows import grouped_bias_grad, grouped_linear, grouped_weight_grad
from ...ops.rank_local import embedding_rows, embedding_rows_backward
from .row_strides import rows_are_neighbours

aten = torch.ops.aten
_ATTENTION = {ring_attention: (ring_attention_backward, 2), tiled_attention: (tiled_attention_backward, 0)}
# Called with the gradients of an operator's outputs: appends its backward, and returns the gradients of its tensor
# inputs (None: an input has none).
Pullback = Callable[[Sequence[fx.Node | None]], list[fx.Node | None]]


class VectorJacobian:
    """Appends operators to a builder, and returns their pullbacks.

    Attributes:
        templates: the traces of operators so far.
        even: returns whether the last dim of a node certainly has stride 1.
        absent: the GPU that the operators are for, if this machine has none.
    """

    def __init__(
        self,
        builder: GraphBuilder,
        templates: dict[Hashable, Template],
        even: Callable[[fx.Node], bool] = rows_are_neighbours,
        absent: AbsentGpu | None = None,
    ) -> None:
        self.builder, self.templates, self.even, self.absent = builder, templates, even, absent

    def apply(
        self,
        target: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        wanted: Sequence[int],
        sums: torch.dtype | None = None,
    ) -> tuple[list[fx.Node | None], Pullback]:
        """Append ``target(*args)``, and return a node for each output, and the pullback.

        ``wanted``: the outputs that a gradient may reach. ``sums``: the dtype in which the gradient of a lookup's table
        is summed, if that is not the dtype of its rows.
        """
        results, pullback = self._applied(target, args, kwargs, wanted)
        if sums is None:
            return results, pullback
        # thousands of tokens may read one row, and kernels on CPUs sum in the dtype of their input
        return results, lambda tangents: pullback([None if t is None else self._cast(t, sums) for t in tangents])

    def _cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return x if value(x).dtype is dtype else self.builder.call(aten._to_copy.default, x, dtype=dtype)

    def _applied(
        self, target: Any, args: Sequence[Any], kwargs: dict[str, Any], wanted: Sequence[int]
    ) -> tuple[list[fx.Node | None], Pullback]:
        by_hand, back, attention = _BY_HAND.get(target), spec_of(target).transpose, _ATTENTION.get(target)
        if by_hand is not None:
            return by_hand(self, *args, **kwargs)
        if back is not None:
            return self._transposed(target, back, args)
        if attention is not None:
            return self._attention(target, *attention, args)
        if target is aten.rms_norm.default and self.absent is not None and _fuses(*args, **kwargs):
            return self._rms_norm(*args, **kwargs)
        tensors: list[fx.Node] = []
        fx.map_arg((tuple(args), kwargs), tensors.append)
        key = (id(self.builder.mode), _key(target, args, kwargs, tensors, wanted))
        template = self.templates.get(key)
        if template is None:
            template = self.templates[key] = trace(
                target, args, kwargs, tensors, wanted, self.builder.mode, self.absent
            )
        return self._inline(template, tensors)

    def _inline(self, template: Template, tensors: list[fx.Node]) -> tuple[list[fx.Node | None], Pullback]:
        """Append a trace's forward on ``tensors``."""
        inputs = [self._strided(template, i, x) for i, x in enumerate(tensors)]
        env: dict[fx.Node, fx.Node] = dict(zip(template.inputs, inputs, strict=True))
        for node in template.graph.nodes:
            if node in template.forward:
                env[node] = self._copy(node, env)

        def pullback(tangents: Sequence[fx.Node | None]) -> list[fx.Node | None]:
            for placeholder, index in zip(template.tangents, template.wanted, strict=True):
                tangent = tangents[index]
                if tangent is None:
                    tangent = self._zeros(placeholder.meta["val"])
                env[placeholder] = self.builder.call(aten.contiguous.default, tangent) if template.dense else tangent
            for node in template.graph.nodes:
                if node.op == "call_function" and node not in template.forward and node not in env:
                    env[node] = self._copy(node, env)
            return _looked_up(template.gradients, env)

        return _looked_up(template.outputs, env), pullback

    def _strided(self, template: Template, position: int, x: fx.Node) -> fx.Node:
        """Return an input with the strides that the trace has assumed."""
        if template.dense or (position in template.even and not self.even(x)):
            return self.builder.call(aten.contiguous.default, x)
        return x

    def _zeros(self, like: Tensor) -> fx.Node:
        device = like.device if self.absent is None else CUDA
        return self.builder.call(aten.zeros.default, list(like.shape), dtype=like.dtype, device=device)

    def _copy(self, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
        if node.target is aten.pow.Tensor_Scalar and node.args[1] == 1:
            return env[node.args[0]]  # type: ignore[index]  # PyTorch's derivative of a square has pow(x, 1)
        if op_spec(node).reshapes:
            return self.builder.reshape(args[0], args[1])  # type: ignore[arg-type]
        return self.builder.call(node.target, *args, **kwargs)  # type: ignore[arg-type]

    def _linear(
        self, x: fx.Node, weight: fx.Node, bias: fx.Node | None = None
    ) -> tuple[list[fx.Node | None], Pullback]:
        """Append a linear layer. A trace of autograd would have three times as many nodes."""
        call = self.builder.call
        inputs = [x, weight] + ([bias] if bias is not None else [])
        out = call(aten.linear.default, *inputs)

        def pullback(tangents: Sequence[fx.Node | None]) -> list[fx.Node | None]:
            grad = tangents[0]
            assert grad is not None
            features_out, features_in = shape(weight)
            rows = self.builder.reshape(grad, [-1, features_out]) if len(shape(grad)) != 2 else grad
            gradients: list[fx.Node | None] = [None] * len(inputs)
            if facts(x).needs_grad:
                gradients[0] = self.builder.reshape(call(aten.mm.default, rows, weight), shape(x))
            if facts(weight).needs_grad:
                flat = self.builder.reshape(x, [-1, features_in]) if len(shape(x)) != 2 else x
                gradients[1] = call(aten.mm.default, call(aten.t.default, rows), flat)
            if bias is not None and facts(bias).needs_grad:
                gradients[2] = call(aten.sum.dim_IntList, rows, [0])
            return gradients

        return [out], pullback

    def _embedding_rows(self, weight: fx.Node, ids: fx.Node, *layout: Any) -> tuple[list[fx.Node | None], Pullback]:

        def pullback(tangents: Sequence[fx.Node | None]) -> list[fx.Node | None]:
            return [self.builder.call(embedding_rows_backward, tangents[0], ids, shape(weight)[0], *layout), None]

        return [self.builder.call(embedding_rows, weight, ids, *layout)], pullback

    def _nll_terms(self, logits: fx.Node, *rest: Any) -> tuple[list[fx.Node | None], Pullback]:
        terms = self.builder.call(nll_terms, logits, *rest)

        def pullback(tangents: Sequence[fx.Node | None]) -> list[fx.Node | None]:
            return [self.builder.call(nll_terms_backward, tangents[0], logits, terms, *rest), None]

        return [terms], pullback

    def _grouped_linear(
        self, rows: fx.Node, ends: fx.Node, weight: fx.Node, bias: fx.Node | None, transposed: bool
    ) -> tuple[list[fx.Node | None], Pullback]:

        def pullback(tangents: Sequence[fx.Node | None]) -> list[fx.Node | None]:
            call, grad = self.builder.call, tangents[0]
            gradients: list[fx.Node | None] = [None] * (3 if bias is None else 4)
            if facts(rows).needs_grad:
                gradients[0] = call(grouped_linear, grad, ends, weight, None, not transposed)
            if facts(weight).needs_grad:
                gradients[2] = call(grouped_weight_grad, grad, rows, ends, transposed)
            if bias is not None and facts(bias).needs_grad:
                gradients[3] = call(grouped_bias_grad, grad, ends)
            return gradients

        return [self.builder.call(grouped_linear, rows, ends, weight, bias, transposed)], pullback

    def _transposed(self, target: Any, back: Any, args: Sequence[Any]) -> tuple[list[fx.Node | None], Pullback]:
        """Append an operator that is linear in its first argument; its transpose takes the same other arguments."""

        def pullback(tangents: Sequence[fx.Node | None]) -> list[fx.Node | None]:
            others = sum(isinstance(x, fx.Node) for x in args[1:])
            return [self.builder.call(back, tangents[0], *args[1:]), *[None] * others]

        return [self.builder.call(target, *args)], pullback

    def _attention(
        self, target: Any, back: Any, places: int, args: Sequence[Any]
    ) -> tuple[list[fx.Node | None], Pullback]:
        """Append attention whose backward needs its output and log-sum-exp.

        ``places``: the number of arguments between q and k, which name the axis of a ring.
        """
        q, axis, (k, v, *options) = args[0], args[1 : 1 + places], args[1 + places :]
        results = self.builder.call(target, *args)
        out, lse = (self.builder.getitem(results, i) for i in range(2))

        def pullback(tangents: Sequence[fx.Node | None]) -> list[fx.Node | None]:
            saved = (q, k, v, out, lse)
            gradients = self.builder.call(back, tangents[0], *axis, *saved, *options)
            terms = [
                self.builder.getitem(gradients, i) if facts(x).needs_grad else None for i, x in enumerate((q, k, v))
            ]
            return [*terms, *(None for x in options if isinstance(x, fx.Node))]

        return [out, lse], pullback

    def _rms_norm(
        self, x: fx.Node, sizes: Sequence[int], weight: fx.Node | None = None, eps: float | None = None
    ) -> tuple[list[fx.Node | None], Pullback]:
        """Append the kernel of CUDA builds. Others have none, and autograd would differentiate the formula."""
        results = self.builder.call(aten._fused_rms_norm.default, x, list(sizes), weight, eps)
        out, rstd = (self.builder.getitem(results, i) for i in range(2))
        inputs = [x] if weight is None else [x, weight]

        def pullback(tangents: Sequence[fx.Node | None]) -> list[fx.Node | None]:
            wanted = [n is not None and facts(n).needs_grad for n in (x, weight)]
            gradients = self.builder.call(
                aten._fused_rms_norm_backward.default, tangents[0], x, list(sizes), rstd, weight, wanted
            )
            return [self.builder.getitem(gradients, i) if wanted[i] else None for i in range(len(inputs))]

        return [out], pullback


# derivatives that are written by hand, as a trace of autograd would have more nodes, or there is none
_BY_HAND: Mapping[Any, Callable[..., tuple[list[fx.Node | None], Pullback]]] = {
    aten.linear.default: VectorJacobian._linear,
    embedding_rows: VectorJacobian._embedding_rows,
    nll_terms: VectorJacobian._nll_terms,
    grouped_linear: VectorJacobian._grouped_linear,
}


def _fuses(x: fx.Node, sizes: Sequence[int], weight: fx.Node | None = None, eps: float | None = None) -> bool:
    """Return whether the fused kernel takes a norm's operands; PyTorch computes others by the formula."""
    return not value(x).is_complex() and (weight is None or value(weight).dtype is value(x).dtype)


def _looked_up(nodes: Sequence[fx.Node | None], env: dict[fx.Node, fx.Node]) -> list[fx.Node | None]:
    return [None if node is None else env[node] for node in nodes]


def _key(
    target: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: list[fx.Node], wanted: Sequence[int]
) -> Hashable:
    """Return what a trace depends on: literals, and the shapes, dtypes and identities of tensors."""
    signatures: list[Hashable] = []
    for node in tensors:
        x = facts(node).value
        assert isinstance(x, Tensor)
        signatures.append((tuple(x.shape), x.dtype, facts(node).needs_grad, tensors.index(node)))
    literals = fx.map_arg((tuple(args), kwargs), lambda _: "*")
    return (str(target), repr(literals), tuple(signatures), tuple(wanted))
