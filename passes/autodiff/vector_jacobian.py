"""The backward of one operator as graph nodes.

Each operator is differentiated on its own, by tracing autograd over it (:mod:`.operator_trace`), and the trace is
reused for every operator with the same arguments and shapes: repeated blocks cost nothing, and every backward node
knows which line of the user's model it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ...core.absent_gpu import CUDA, AbsentGpu
from ...core.annotations import facts, shape, value
from ...ir.builder import GraphBuilder
from ...ops.attention.tiled import tiled_attention, tiled_attention_backward
from ...ops.collectives import COLLECTIVES, ring_attention, ring_attention_backward
from ...ops.cross_entropy import nll_terms, nll_terms_backward
from ...ops.experts.grouped_rows import group_rows, grouped_bias_grad, grouped_linear, grouped_weight_grad, ungroup_rows
from ...ops.rank_local import embedding_rows, embedding_rows_backward, pick_experts, place_experts
from .operator_trace import VIEWS, Template, trace
from .row_strides import rows_are_neighbours

aten = torch.ops.aten
_TRANSPOSES = {
    **{one.op: one.transpose for one in COLLECTIVES.values()},
    group_rows: ungroup_rows,
    ungroup_rows: group_rows,
    pick_experts: place_experts,
}
_ATTENTION = {ring_attention: (ring_attention_backward, 2), tiled_attention: (tiled_attention_backward, 0)}
# What an operator left behind: called with the gradients of its outputs, appends its backward and returns the
# gradients of its tensor inputs (None where there is none).
Pullback = Callable[[Sequence[fx.Node | None]], list[fx.Node | None]]


class VectorJacobian:
    """Appends operators to a builder together with what their backward needs. ``templates``: those traced already;
    ``even``: whether the last dim of a node surely has stride 1; ``absent``: the GPU that the operators are for, where
    this machine has none."""

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
        """Append ``target(*args)``. ``wanted``: the outputs whose gradient may arrive. ``sums``, of a lookup: the dtype
        in which the gradient of the table is added up, where that is not the one in which its rows are read.

        Returns a node per output, and the pullback.
        """
        made, pullback = self._applied(target, args, kwargs, wanted)
        if sums is None:
            return made, pullback
        # thousands of tokens may read one row, and kernels on CPUs add up in the dtype that they are given
        return made, lambda tangents: pullback([None if t is None else self._cast(t, sums) for t in tangents])

    def _cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return x if value(x).dtype is dtype else self.builder.call(aten._to_copy.default, x, dtype=dtype)

    def _applied(
        self, target: Any, args: Sequence[Any], kwargs: dict[str, Any], wanted: Sequence[int]
    ) -> tuple[list[fx.Node | None], Pullback]:
        if target is aten.linear.default:
            return self._linear(args, kwargs)
        if target is embedding_rows:
            return self._embedding_rows(args)
        if target is nll_terms:
            return self._nll_terms(args)
        if target is grouped_linear:
            return self._grouped_linear(args)
        if (back := _TRANSPOSES.get(target)) is not None:
            return self._transposed(target, back, args)
        if target in _ATTENTION:
            return self._attention(target, *_ATTENTION[target], args)
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
        given = [
            self.builder.call(aten.contiguous.default, x)
            if template.dense or (i in template.even and not self.even(x))
            else x
            for i, x in enumerate(tensors)
        ]
        env: dict[fx.Node, fx.Node] = dict(zip(template.inputs, given, strict=True))
        for node in template.graph.nodes:
            if node in template.forward:
                env[node] = self._copy(node, env)

        def pullback(tangents: Sequence[fx.Node | None]) -> list[fx.Node | None]:
            for place, index in zip(template.tangents, template.wanted, strict=True):
                tangent = tangents[index]
                if tangent is None:
                    known = place.meta["val"]
                    device = known.device if self.absent is None else CUDA
                    tangent = self.builder.call(aten.zeros.default, list(known.shape), dtype=known.dtype, device=device)
                env[place] = self.builder.call(aten.contiguous.default, tangent) if template.dense else tangent
            for node in template.graph.nodes:
                if node.op == "call_function" and node not in template.forward and node not in env:
                    env[node] = self._copy(node, env)
            return [None if g is None else env[g] for g in template.gradients]

        return [None if o is None else env[o] for o in template.outputs], pullback

    def _copy(self, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
        if node.target is aten.pow.Tensor_Scalar and node.args[1] == 1:
            return env[node.args[0]]  # type: ignore[index]  # the derivative of a square says pow(x, 1)
        if node.target in VIEWS:
            return self.builder.reshape(args[0], args[1])  # type: ignore[arg-type]
        return self.builder.call(node.target, *args, **kwargs)  # type: ignore[arg-type]

    def _linear(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[list[fx.Node | None], Pullback]:
        """linear by hand: autograd's own trace of it has three times as many nodes."""
        x, weight, bias = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("bias")
        call = self.builder.call
        inputs = [x, weight] + ([bias] if bias is not None else [])
        out = call(aten.linear.default, *inputs)

        def pullback(tangents: Sequence[fx.Node | None]) -> list[fx.Node | None]:
            grad = tangents[0]
            assert grad is not None
            features_out, features_in = shape(weight)
            rows = self.builder.reshape(grad, [-1, features_out]) if len(shape(grad)) != 2 else grad
            found: list[fx.Node | None] = [None] * len(inputs)
            if facts(x).needs_grad:
                found[0] = self.builder.reshape(call(aten.mm.default, rows, weight), shape(x))
            if facts(weight).needs_grad:
                flat = self.builder.reshape(x, [-1, features_in]) if len(shape(x)) != 2 else x
                found[1] = call(aten.mm.default, call(aten.t.default, rows), flat)
            if bias is not None and facts(bias).needs_grad:
                found[2] = call(aten.sum.dim_IntList, rows, [0])
            return found

        return [out], pullback

    def _embedding_rows(self, args: Sequence[Any]) -> tuple[list[fx.Node | None], Pullback]:
        weight, ids, *layout = args

        def pullback(tangents: Sequence[fx.Node | None]) -> list[fx.Node | None]:
            return [self.builder.call(embedding_rows_backward, tangents[0], ids, shape(weight)[0], *layout), None]

        return [self.builder.call(embedding_rows, *args)], pullback

    def _nll_terms(self, args: Sequence[Any]) -> tuple[list[fx.Node | None], Pullback]:
        terms = self.builder.call(nll_terms, *args)

        def pullback(tangents: Sequence[fx.Node | None]) -> list[fx.Node | None]:
            logits, *rest = args
            return [self.builder.call(nll_terms_backward, tangents[0], logits, terms, *rest), None]

        return [terms], pullback

    def _grouped_linear(self, args: Sequence[Any]) -> tuple[list[fx.Node | None], Pullback]:
        rows, ends, weight, bias, transposed = args

        def pullback(tangents: Sequence[fx.Node | None]) -> list[fx.Node | None]:
            call, grad = self.builder.call, tangents[0]
            found: list[fx.Node | None] = [None] * (3 if bias is None else 4)
            if facts(rows).needs_grad:
                found[0] = call(grouped_linear, grad, ends, weight, None, not transposed)
            if facts(weight).needs_grad:
                found[2] = call(grouped_weight_grad, grad, rows, ends, transposed)
            if bias is not None and facts(bias).needs_grad:
                found[3] = call(grouped_bias_grad, grad, ends)
            return found

        return [self.builder.call(grouped_linear, *args)], pullback

    def _transposed(self, target: Any, back: Any, args: Sequence[Any]) -> tuple[list[fx.Node | None], Pullback]:
        """An operator on its first argument whose transpose takes the same others."""

        def pullback(tangents: Sequence[fx.Node | None]) -> list[fx.Node | None]:
            others = sum(isinstance(x, fx.Node) for x in args[1:])
            return [self.builder.call(back, tangents[0], *args[1:]), *[None] * others]

        return [self.builder.call(target, *args)], pullback

    def _attention(
        self, target: Any, back: Any, places: int, args: Sequence[Any]
    ) -> tuple[list[fx.Node | None], Pullback]:
        """Attention whose backward needs its output and logs. ``places``: how many arguments between q and k say where
        it runs."""
        q, *rest = args
        place, (k, v, *options) = rest[:places], rest[places:]
        made = self.builder.call(target, *args)
        out, lse = (self.builder.getitem(made, i) for i in range(2))

        def pullback(tangents: Sequence[fx.Node | None]) -> list[fx.Node | None]:
            saved = (q, k, v, out, lse)
            found = self.builder.call(back, tangents[0], *place, *saved, *options)
            terms = [self.builder.getitem(found, i) if facts(x).needs_grad else None for i, x in enumerate((q, k, v))]
            return [*terms, *(None for x in options if isinstance(x, fx.Node))]

        return [out, lse], pullback

    def _rms_norm(
        self, x: fx.Node, sizes: Sequence[int], weight: fx.Node | None = None, eps: float | None = None
    ) -> tuple[list[fx.Node | None], Pullback]:
        """As CUDA builds run it; others have no such kernel, and autograd would differentiate the formula."""
        made = self.builder.call(aten._fused_rms_norm.default, x, list(sizes), weight, eps)
        out, rstd = (self.builder.getitem(made, i) for i in range(2))
        inputs = [x] if weight is None else [x, weight]

        def pullback(tangents: Sequence[fx.Node | None]) -> list[fx.Node | None]:
            wanted = [n is not None and facts(n).needs_grad for n in (x, weight)]
            given = (tangents[0], x, list(sizes), rstd, weight, wanted)
            found = self.builder.call(aten._fused_rms_norm_backward.default, *given)
            return [self.builder.getitem(found, i) if wanted[i] else None for i in range(len(inputs))]

        return [out], pullback


def _fuses(x: fx.Node, sizes: Sequence[int], weight: fx.Node | None = None, eps: float | None = None) -> bool:
    """Whether the fused kernel takes a norm's operands; PyTorch computes others by the formula."""
    return not value(x).is_complex() and (weight is None or value(weight).dtype is value(x).dtype)


def _key(
    target: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: list[fx.Node], wanted: Sequence[int]
) -> Hashable:
    seen: list[Hashable] = []
    for node in tensors:
        x = facts(node).value
        assert isinstance(x, Tensor)
        seen.append((tuple(x.shape), x.dtype, facts(node).needs_grad, tensors.index(node)))
    literals = fx.map_arg((tuple(args), kwargs), lambda _: "*")
    return (str(target), repr(literals), tuple(seen), tuple(wanted))
