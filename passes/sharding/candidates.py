"""The strategies that an axis' role and the plan allow an operator, of those that its rule allows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ...core.annotations import Leaf, facts, leaf, needs_grad, origin, shape, tensor_inputs, value
from ...core.errors import CompileError
from ...core.precision import narrows
from ...core.sharding import AxisType, I, R, S, Shard, forward_type, local_shape
from ...ir.program import Strategy
from ...ops.catalog import op_spec
from ...ops.rules.notation import Factors
from ...strategies.expert_axes import exchanging_strategies, expert_parameters
from ...strategies.rule_book import may_pad
from .axis_view import AxisView, OperandEdge, refusal
from .batch_factors import batch_dependent, batch_factors

aten = torch.ops.aten
# the factors of attention that a context axis splits, by mode; later ones where an operator lacks the first
CONTEXT_FACTORS: Mapping[str, list[set[str]]] = {
    "all_gather": [{"s"}],
    "ulysses": [{"g", "r"}],
    "ring": [{"s+t"}, {"s"}],
}


class Candidates:
    """The candidate strategies of operators on one axis: call it with an operator and the cuts of its dims.

    Attributes:
        split_in_time: what the model computes from the batch: no microbatch may compute it for all others.
        single_row: whether all data ranks compute the same row: a dim of size 1 may be broadcast, so none is split.
        samples: the factors of each operator that run over samples, on a context axis.
        activations: operators that depend on the batch and on parameters.
        weights: parameters that products read, and whether they must be sliced without padding.

    Raises:
        CompileError: QN104 if an operator would need all microbatches at once, QN106 if the batch does not divide,
            QN203 if a fixed type or the heads do not.
    """

    def __init__(self, view: AxisView) -> None:
        graph, role = view.program.graph, view.axis.role
        self.view, self.axis, self.constraints = view, view.axis, view.constraints
        self.split_in_time = batch_dependent(graph) if role == "time" else frozenset()
        self.single_row = role == "data" and view.rows == 1 and not view.spreads_experts
        self.samples = batch_factors(graph, view.factors) if role == "context" else {}
        self.activations = batch_dependent(graph) if role in ("context", "model") else frozenset()
        self.expert_parameters = expert_parameters(graph) if view.spreads_experts else frozenset[fx.Node]()
        self.weights = _contraction_weights(graph, view.factors) if role == "model" else dict[fx.Node, bool]()

    def __call__(self, node: fx.Node, cuts: Mapping[str, set[int]]) -> tuple[Strategy, ...]:
        options = self._without_forbidden(node, self.view.legal(node, cuts))
        info = leaf(node)
        if info is not None:
            return self._of_leaf(node, info, options, cuts)
        if self.axis.role == "context":
            return self._within_samples(node, options)
        if node in self.split_in_time:
            return self._split_in_time(node, options)
        return options

    def _without_forbidden(self, node: fx.Node, options: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        """Return the strategies that exchange rows only where the plan asks for it, and lose no precision."""
        if op_spec(node).by_expert and self.view.spreads_experts:
            options = exchanging_strategies(node, options, self.axis)
        elif not _splits_positions(node) or self.axis.role != "context":
            options = tuple(s for s in options if not s.exchanges)
        if _rounds_gradient(node, self.activations):
            options = tuple(s for s in options if R not in s.inputs)
        if self.single_row:
            options = tuple(s for s in options if not s.splits)
        return options

    def _split_in_time(self, node: fx.Node, options: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        """Return the strategies in which each microbatch computes a part."""
        parts = tuple(s for s in options if not s.label.startswith("replicated"))
        if not parts:
            raise refusal(self.view, OperandEdge(node, node, 0, grad=True))
        return parts

    def _of_leaf(
        self, node: fx.Node, info: Leaf, options: tuple[Strategy, ...], cuts: Mapping[str, set[int]]
    ) -> tuple[Strategy, ...]:
        fixed = self.constraints.fixed.get((info.name, self.axis.name))
        if fixed is not None and not (isinstance(fixed, Shard) and self.view.stores(info)):
            return self._fixed(node, info, fixed, options)
        if node in self.expert_parameters:
            return tuple(s for s in options if s.outputs[0] == S(0))
        if self.axis.role == "model" and info.kind == "parameter":
            return self._of_weight(node, options, cuts)
        if self.axis.role == "model" and info.kind == "cache":
            return options
        wanted = self._leaf_type(info)
        matching = tuple(s for s in options if s.outputs[0] == wanted)
        if not matching:
            raise self._indivisible()
        return matching

    def _fixed(self, node: fx.Node, info: Leaf, fixed: AxisType, options: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        """Return the strategies that give a leaf the type that the plan fixes."""
        allowed = tuple(
            s for s in options if s.outputs[0] == fixed or forward_type(s.outputs[0]) == forward_type(fixed) is I
        )
        if not allowed:
            local = local_shape(shape(node), tuple(s.outputs[0] for s in self.view.chosen[node]), self.view.outer_sizes)
            raise CompileError(
                "QN203",
                f"{info.name} of shape {tuple(local)} cannot be {fixed} over {self.axis.name}={self.axis.size}",
                fix=f"use one of {', '.join(str(s.outputs[0]) for s in options)}",
            )
        return allowed

    def _of_weight(
        self, node: fx.Node, options: tuple[Strategy, ...], cuts: Mapping[str, set[int]]
    ) -> tuple[Strategy, ...]:
        """Return the strategies of a parameter on a model axis: weights of products are sliced wherever they can be."""
        if node not in self.weights:
            return options
        must_be_even = self.weights[node]
        shards = tuple(s for s in options if isinstance(s.outputs[0], Shard) and not (must_be_even and s.uneven))
        return shards if shards and not self._splits_units(node, cuts) else options

    def _leaf_type(self, info: Leaf) -> AxisType:
        """Return the type of a leaf that neither the plan nor a product decides."""
        if self.axis.role == "model":
            return I
        if self.axis.role == "data" and info.kind in ("input", "cache") and info.batched and not self.single_row:
            return S(0)
        return R if info.trainable else I

    def _within_samples(self, node: fx.Node, options: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        """Return the strategies that split sequences, never the batch.

        Products with weights must be split wherever they can be.
        """
        rows = self.view.rows

        def whole_samples(strategy: Strategy) -> bool:
            if not strategy.splits:
                return True
            name, cut = strategy.factor
            return name.partition("+")[0] not in self.samples[node] or cut >= rows

        candidates = tuple(s for s in options if whole_samples(s))
        attention = op_spec(node).attention
        if attention is not None and attention.of_models:
            return self._attention(node, candidates)
        if node in self.activations and _place_of_weight(node) is not None:
            return tuple(s for s in candidates if s.splits and self._keeps_weight(node, s)) or candidates
        return candidates

    def _attention(self, node: fx.Node, options: tuple[Strategy, ...]) -> tuple[Strategy, ...]:
        """Return the strategies that split what the plan says: the queries, the heads, or queries and keys.

        Where no ring is possible (a mask of the user's own), the queries; whole where neither the sequence nor the
        heads divide.
        """
        for factors in CONTEXT_FACTORS[self.constraints.context]:
            candidates = tuple(s for s in options if s.splits and s.factor[0].rstrip("oi") in factors)
            if candidates:
                return candidates
        if self.constraints.context == "ulysses":
            heads, size = shape(node)[-3] if len(shape(node)) > 2 else 1, self.axis.size
            raise CompileError(
                "QN203",
                f"{heads} heads (after the other axes) cannot be exchanged for sequences over {self.axis.name}={size}",
                where=facts(node).where,
                fix='use context="all_gather"',
            )
        return tuple(s for s in options if not s.exchanges)

    def _keeps_weight(self, node: fx.Node, strategy: Strategy) -> bool:
        """Return whether a strategy leaves the weight of a product whole, on whichever side it stands."""
        position, operands, product = _place_of_weight(node), tensor_inputs(node), op_spec(node).product
        assert position is not None
        either_side = product is not None and position == 1 and not product.transposed
        if either_side and self._of_batch(operands[1]):
            position = 1 if self._of_batch(operands[0]) else 0
        return strategy.inputs[position] in (I, R)

    def _of_batch(self, node: fx.Node) -> bool:
        source, _ = origin(node)
        info = leaf(source)
        return source in self.activations or (info is not None and info.batched)

    def _splits_units(self, node: fx.Node, cuts: Mapping[str, set[int]]) -> bool:
        """Return whether there are fewer units (heads) than ranks, and every even split of a dim cuts through one.

        With grouped-query attention, key and value heads may be fewer than ranks. Then ranks may store a whole
        parameter, and read whole units of it.
        """
        for name, inner_cuts in cuts.items():
            size = self.view.factors[node].sizes[name]
            unit = size // max(inner_cuts, default=1)
            pieces = [cut * self.axis.size for cut in (1, *inner_cuts)]
            even_parts = [size // count for count in pieces if size % count == 0]
            if inner_cuts and max(inner_cuts) < self.axis.size and all(length % unit for length in even_parts):
                return True
        return False

    def _indivisible(self) -> CompileError:
        """Return the error for a batch that the axis does not divide."""
        rows, size = self.view.program.batch_size, self.axis.size
        outer_parts = math.prod(self.view.outer_sizes)
        multiple = size * outer_parts
        return CompileError(
            "QN106",
            f"a batch of {rows} does not divide over {self.axis.name}={size}"
            + (f" after {outer_parts} ways of the other axes" if outer_parts > 1 else ""),
            fix=f"use a batch of {max(1, rows // multiple) * multiple} or a multiple of {multiple}",
        )


def _splits_positions(node: fx.Node) -> bool:
    """Return whether ranks can have other positions of what an operator attends to."""
    attention = op_spec(node).attention
    return attention is not None and attention.splits_positions


def _rounds_gradient(node: fx.Node, activations: frozenset[fx.Node]) -> bool:
    """Return whether the gradient of a cast is rounded: it must not be a term of a sum then."""
    if not op_spec(node).casts or node not in activations or not needs_grad(node):
        return False
    return narrows(value(node).dtype, value(tensor_inputs(node)[0]).dtype)


def _place_of_weight(node: fx.Node) -> int | None:
    """Return the position of the operand of a product that may be a weight; None for other operators."""
    if op_spec(node).by_expert:
        return 2
    product = op_spec(node).product
    return product.weight if product is not None else None


def _contraction_weights(graph: fx.Graph, factors: Mapping[fx.Node, Factors]) -> dict[fx.Node, bool]:
    """Return parameters that a matmul reads as its weight, and whether they must be sliced without padding.

    These are what tensor parallelism splits, except for those that another operator needs whole (a determinant).
    """
    weights = dict[fx.Node, bool]()
    for node in graph.nodes:
        position = _place_of_weight(node)
        if position is None:
            continue
        weight = node.args[position]
        while isinstance(weight, fx.Node):
            info = leaf(weight)
            if info is not None:
                if info.kind == "parameter" and not _needed_whole(weight, factors):
                    weights[weight] = weights.get(weight, False) or not may_pad(node)
                break
            if op_spec(weight).permutes is None and op_spec(weight).user_derivative != "end":
                break
            weight = weight.args[0] if op_spec(weight).permutes is not None else _unchanged_parameter(weight)
    return weights


def _unchanged_parameter(node: fx.Node) -> Any:
    """Return the parameter that forward has changed in place to make this value, or None for any other value.

    See :mod:`...capture.changes.changed_values`.
    """
    declaration = origin(tensor_inputs(node)[-1])[0]
    start = declaration.args[0] if op_spec(declaration).user_derivative == "declaration" else None
    if not isinstance(start, fx.Node) or op_spec(start).user_derivative != "end" or len(tensor_inputs(start)) > 1:
        return None
    return start.args[0]


def _needed_whole(source: fx.Node, factors: Mapping[fx.Node, Factors]) -> bool:
    """Return whether an operator reads ``source``, or its transpose, and can split none of its dims."""
    for user in source.users:
        if user.op != "call_function":
            continue
        if op_spec(user).permutes is not None and _needed_whole(user, factors):
            return True
        if user in factors and _splits_no_dim(factors[user], tensor_inputs(user), source):
            return True
    return False


def _splits_no_dim(user_factors: Factors, operands: Sequence[fx.Node], source: fx.Node) -> bool:
    for operand, dims in zip(operands, user_factors.inputs, strict=True):
        if operand is source and dims and {name for dim in dims for name in dim} <= user_factors.whole:
            return True
    return False
