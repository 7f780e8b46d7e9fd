"""Which of the strategies that a rule allows an axis' role and the plan let an operator have."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ...core.annotations import facts, is_getitem, leaf, needs_grad, origin, shape, tensor_inputs, value
from ...core.errors import CompileError
from ...core.precision import narrows
from ...core.sharding import AxisType, I, R, S, Shard, local_shape, plain
from ...ir.program import Strategy
from ...ops.attention.operator import attention
from ...ops.derivatives.user_derivatives import after_gradients, declare_gradient
from ...ops.experts.scaled_groups import EXPERT_LAYERS
from ...ops.rules.notation import Factors
from ..strategies.expert_axes import expert_parameters, travelling
from ..strategies.rule_book import may_pad
from .axis_view import AxisView, OperandEdge, refusal
from .batch_factors import batch_factors, made_of_the_batch

aten = torch.ops.aten
# products, and the position of the operand that may be a weight
CONTRACTIONS: Mapping[Any, int] = {
    **dict.fromkeys([aten.linear.default, aten.matmul.default, aten.mm.default, aten.bmm.default], 1),
    aten.addmm.default: 2,
    **dict.fromkeys(EXPERT_LAYERS, 2),
}

_TRANSPOSED = (aten.permute.default, aten.transpose.int, aten.t.default)


class Candidates:
    """Call it with an operator and the cuts of its dims.

    Raises:
        CompileError: QN104 if an operator would need all microbatches at once, QN106 if the batch does not divide,
            QN203 if a fixed type or the heads do not.
    """

    def __init__(self, view: AxisView) -> None:
        graph, role = view.program.graph, view.axis.role
        self.view, self.axis, self.constraints = view, view.axis, view.constraints
        # What the model makes of the batch: no microbatch may compute it for all the others.
        self.split_in_time = made_of_the_batch(graph) if role == "time" else frozenset()
        # which all data ranks compute: a dim of size 1 may be one that broadcasts, and has no part in views
        self.single_row = role == "data" and view.rows == 1 and not view.spreads_experts
        self.samples = batch_factors(graph, view.factors) if role == "context" else {}
        self.work = made_of_the_batch(graph) if role in ("context", "model") else frozenset()
        self.expert_parameters = expert_parameters(graph) if view.spreads_experts else frozenset[fx.Node]()
        self.weights = _contraction_weights(graph, view.factors) if role == "model" else dict[fx.Node, bool]()

    def __call__(self, node: fx.Node, cuts: Mapping[str, set[int]]) -> tuple[Strategy, ...]:
        found, options = leaf(node), self.view.legal(node, cuts)
        if node.target in EXPERT_LAYERS and self.view.spreads_experts:
            options = travelling(node, options, self.axis)
        elif node.target is not attention or self.axis.role != "context":
            options = tuple(s for s in options if not s.exchanges)
        if _widens(node, self.work):
            options = tuple(s for s in options if R not in s.inputs)
        if self.single_row:
            options = tuple(s for s in options if not s.splits)
        if found is None and self.axis.role == "context":
            return self._within_samples(node, options)
        if found is None:
            if node not in self.split_in_time:
                return options
            parts = tuple(s for s in options if not s.label.startswith("replicated"))
            if not parts:
                raise refusal(self.view, OperandEdge(node, node, 0, grad=True))
            return parts
        fixed = self.constraints.fixed.get((found.name, self.axis.name))
        if fixed is not None and not (isinstance(fixed, Shard) and self.view.stores(found)):
            allowed = [s for s in options if s.outputs[0] == fixed or plain(s.outputs[0]) == plain(fixed) is I]
            if not allowed:
                left = local_shape(shape(node), tuple(s.outputs[0] for s in self.view.chosen[node]), self.view.ranks)
                raise CompileError(
                    "QN203",
                    f"{found.name} of shape {tuple(left)} cannot be {fixed} over {self.axis.name}={self.axis.size}",
                    fix=f"use one of {', '.join(str(s.outputs[0]) for s in options)}",
                )
            return tuple(allowed)
        if node in self.expert_parameters:
            return tuple(s for s in options if s.outputs[0] == S(0))
        if self.axis.role in ("time", "context"):
            wanted: AxisType = R if found.trainable else I
        elif self.axis.role == "data":
            rows = found.kind in ("input", "cache") and found.batched and not self.single_row
            wanted = S(0) if rows else R if found.trainable else I
        elif found.kind == "parameter":
            even = self.weights.get(node, False)
            shards = tuple(s for s in options if isinstance(s.outputs[0], Shard) and not (even and s.uneven))
            must = node in self.weights and shards and not self._torn(node, cuts)
            return shards if must else options
        elif found.kind == "cache":
            return options
        else:
            wanted = I
        return tuple(s for s in options if s.outputs[0] == wanted) or self._indivisible(node)

    def _within_samples(self, node: fx.Node, options: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        """A context axis splits sequences, never the batch; and products with weights must be split if they can be."""
        rows = self.view.rows

        def whole_samples(strategy: Strategy) -> bool:
            if not strategy.splits:
                return True
            name, cut = strategy.factor
            return name.partition("+")[0] not in self.samples[node] or cut >= rows

        found = tuple(s for s in options if whole_samples(s))
        if node.target in (aten.scaled_dot_product_attention.default, attention):
            return self._attention(node, found)
        if node in self.work and node.target in CONTRACTIONS:
            found = tuple(s for s in found if s.splits and self._sequence(node, s)) or found
        return found

    def _attention(self, node: fx.Node, options: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        """The queries, the heads, or queries and keys, as the plan says. Where no ring is possible (a mask of the
        user's own), the queries; whole where neither the sequence nor the heads divide."""
        splits = [(s.factor[0].rstrip("oi"), s) for s in options if s.splits]
        found: tuple[Strategy, ...] = ()
        for wanted in {"all_gather": [{"s"}], "ulysses": [{"g", "r"}], "ring": [{"s+t"}, {"s"}]}[
            self.constraints.context
        ]:
            found = found or tuple(s for name, s in splits if name in wanted)
        if not found and self.constraints.context == "ulysses":
            heads, size = shape(node)[-3] if len(shape(node)) > 2 else 1, self.axis.size
            raise CompileError(
                "QN203",
                f"{heads} heads (after the other axes) cannot be exchanged for sequences over {self.axis.name}={size}",
                where=facts(node).where,
                fix='use context="all_gather"',
            )
        return found or tuple(s for s in options if not s.exchanges)

    def _sequence(self, node: fx.Node, strategy: Strategy) -> bool:
        """Whether a strategy leaves the weight as it is. It may stand on the left of a product."""
        position, given = CONTRACTIONS[node.target], tensor_inputs(node)
        if position == 1 and node.target is not aten.linear.default and self._of_batch(given[1]):
            position = 1 if self._of_batch(given[0]) else 0
        return strategy.inputs[position] in (I, R)

    def _of_batch(self, node: fx.Node) -> bool:
        found = leaf(origin(node)[0])
        return origin(node)[0] in self.work or (found is not None and found.batched)

    def _torn(self, node: fx.Node, cuts: Mapping[str, set[int]]) -> bool:
        """Whether every even split of some dim would tear a unit of it (a head) that an operator reads as a dim, and
        there are fewer than ranks (heads of keys that several heads of queries read): then ranks may store all of a
        parameter, and read whole units of it."""
        for name, inside in cuts.items():
            size = self.view.factors[node].sizes[name]
            unit = size // max(inside, default=1)
            even = [size // (cut * self.axis.size) for cut in (1, *inside) if size % (cut * self.axis.size) == 0]
            if inside and max(inside) < self.axis.size and all(rows % unit for rows in even):
                return True
        return False

    def _indivisible(self, node: fx.Node) -> tuple[Strategy, ...]:
        found = leaf(node)
        assert found is not None
        rows, size = self.view.program.batch_size, self.axis.size
        already = math.prod(self.view.ranks)
        raise CompileError(
            "QN106",
            f"a batch of {rows} does not divide over {self.axis.name}={size}"
            + (f" after {already} ways of the other axes" if already > 1 else ""),
            fix=f"use a batch of {max(1, rows // (size * already)) * size * already} or a multiple of {size * already}",
        )


def _widens(node: fx.Node, activations: frozenset[fx.Node]) -> bool:
    """Whether the gradient of this cast rounds: then it must not be a term of a sum."""
    if node.target is not aten._to_copy.default or node not in activations or not needs_grad(node):
        return False
    return narrows(value(node).dtype, value(tensor_inputs(node)[0]).dtype)


def _contraction_weights(graph: fx.Graph, factors: Mapping[fx.Node, Factors]) -> dict[fx.Node, bool]:
    """Parameters that are the second operand of a matmul: what tensor parallelism is there to split; and whether that
    takes slices without padding alone. Without those of which another operator needs all (a determinant)."""
    found = dict[fx.Node, bool]()
    for node in graph.nodes:
        if node.op != "call_function" or is_getitem(node) or node.target not in CONTRACTIONS:
            continue
        weight = node.args[CONTRACTIONS[node.target]]
        while isinstance(weight, fx.Node):
            kind = leaf(weight)
            if kind is not None:
                if kind.kind == "parameter" and not _needed_whole(weight, factors):
                    found[weight] = found.get(weight, False) or not may_pad(node)
                break
            if weight.target not in _TRANSPOSED and weight.target is not after_gradients:
                break
            weight = weight.args[0] if weight.target in _TRANSPOSED else _changed(weight)
    return found


def _changed(now: fx.Node) -> Any:
    """The parameter that forward has changed in place to make this, see
    :mod:`...capture.changes.changed_values`; None if this is nothing of that kind."""
    says = origin(tensor_inputs(now)[-1])[0]
    start = says.args[0] if says.target is declare_gradient else None
    if not isinstance(start, fx.Node) or start.target is not after_gradients or len(tensor_inputs(start)) > 1:
        return None
    return start.args[0]


def _needed_whole(source: fx.Node, factors: Mapping[fx.Node, Factors]) -> bool:
    """Whether an operator reads ``source``, or its transpose, and can split none of its dims."""
    for user in source.users:
        if user.op != "call_function":
            continue
        if user.target in _TRANSPOSED and _needed_whole(user, factors):
            return True
        spec = factors.get(user)
        dims = [] if spec is None else [d for n, d in zip(tensor_inputs(user), spec.inputs, strict=True) if n is source]
        if spec is not None and any({name for dim in one for name in dim} <= spec.whole for one in dims if one):
            return True
    return False
