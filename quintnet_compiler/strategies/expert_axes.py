"""Axes over which experts are spread: each rank stores some experts, and rows travel to them and back."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import fx

from ..core.annotations import facts, leaf, num_bytes, shape, tensor_inputs, values
from ..core.errors import CompileError
from ..core.sharding import AxisType, I, P, S, Shard, forward_type
from ..ir.program import Axis, Strategy
from ..ops.catalog import op_spec


def expert_parameters(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the parameters that have one part per expert: weights and biases of ``expert_linear``."""
    layers = [node for node in graph.nodes if node.op == "call_function" and op_spec(node).by_expert]
    return frozenset(operand for node in layers for operand in tensor_inputs(node)[2:] if leaf(operand) is not None)


def dispatched_bytes(graph: fx.Graph, repeats: Mapping[fx.Node, int]) -> int:
    """Return the bytes of the rows that go to experts, and of their results.

    In a mixture of several layers with the same ids, these are the rows of the first and the results of the last.
    ``repeats``: how many nodes of the whole model a node stands for.
    """
    mixtures: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function" and op_spec(node).by_expert:
            mixtures[node.all_input_nodes[1]].append(node)
    ends = [(layers[0].all_input_nodes[0], layers[-1]) for layers in mixtures.values()]
    return sum(num_bytes(values(node)[0]) * repeats.get(last, 1) for first, last in ends for node in (first, last))


def check_experts(graph: fx.Graph, axes: Sequence[str]) -> None:
    """Raise if a plan spreads experts over ``axes`` and the model has none.

    Raises:
        CompileError: QN204.
    """
    if axes and not expert_parameters(graph):
        raise CompileError(
            "QN204",
            f"the plan spreads experts over {' and '.join(axes)}, and the model has no expert_linear",
            fix="leave experts out, or shard parameters by name (see docs/experts.md)",
        )


def exchanging_strategies(node: fx.Node, options: Iterable[Strategy], axis: Axis) -> tuple[Strategy, ...]:
    """Return the strategies in which each rank has its own rows and its own experts.

    Raises:
        CompileError: QN203 if outer axes have split the experts, and what is left of them does not divide.
    """
    exchanging = tuple(s for s in options if s.exchanges)
    if not exchanging:
        raise CompileError(
            "QN203",
            f"{shape(tensor_inputs(node)[2])[0]} experts cannot be spread over {axis.name}={axis.size}: what is left "
            "of them after the axes before it must divide",
            where=facts(node).where,
            fix="spread experts over one axis, or over sizes whose product divides their number",
        )
    return exchanging


def with_sliced_rows(node: fx.Node, options: Iterable[Strategy], axis: Axis) -> tuple[Strategy, ...]:
    """Return variants of strategies in which each rank of ``axis`` sends or returns a slice of the rows' features.

    The rows travel over another axis, and all ranks of ``axis`` have them. Slices are gathered where they arrive;
    partial results are reduce-scattered there before they return (after Singh et al. 2023, "A Hybrid
    Tensor-Expert-Data Parallelism Approach to Optimize Mixture-of-Experts Training"). There are none where ranks of
    ``axis`` have different experts, as each orders rows by its own.
    """
    rows_divide = shape(tensor_inputs(node)[0])[1] % axis.size == 0
    results_divide = shape(node)[1] % axis.size == 0
    variants = list[Strategy]()
    for strategy in options:
        if not strategy.splits or strategy.uneven or splits_experts(strategy):
            continue
        read, written = strategy.inputs[0], strategy.outputs[0]
        arriving: list[AxisType] = [read, *([S(1)] if rows_divide and forward_type(read) is I else [])]
        leaving: list[AxisType] = [written, *([S(1)] if results_divide and written is P else [])]
        for sent, returned in itertools.product(arriving, leaving):
            if (sent, returned) != (read, written):
                inputs = (sent, *strategy.inputs[1:])
                variants.append(replace(strategy, inputs=inputs, outputs=(returned,), inside=(read, written)))
    return tuple(variants)


def hops(axes: Sequence[Axis], chosen: Sequence[Strategy]) -> list[tuple[Axis, int]]:
    """Return the axes on which the rows of an ``expert_linear`` travel, each with the parts of experts outside it."""
    axes_and_parts, parts = [], 1
    for axis, strategy in zip(axes, chosen, strict=True):
        if strategy.exchanges:
            axes_and_parts.append((axis, parts))
        if splits_experts(strategy):
            parts *= axis.size
    return axes_and_parts


Conversion = tuple[str, int, str, str]  # an axis, its size, and the types before and after


def row_conversions(axes: Sequence[Axis], chosen: Sequence[Strategy]) -> tuple[list[Conversion], list[Conversion]]:
    """Return the conversions of an ``expert_linear``'s rows after they arrive, and of its results before they leave."""
    arriving, leaving = list[Conversion](), list[Conversion]()
    for axis, strategy in zip(axes, chosen, strict=True):
        if strategy.inside is None:
            continue
        read, written = strategy.inside
        for conversions, source, target in (
            (arriving, strategy.inputs[0], read),
            (leaving, written, strategy.outputs[0]),
        ):
            if source != target:
                conversions.append((axis.name, axis.size, str(source), str(target)))
    return arriving, leaving


def splits_experts(strategy: Strategy) -> bool:
    """Return whether each rank has a part of the experts."""
    weights = strategy.inputs[2]
    return isinstance(weights, Shard) and weights.dim == 0
