"""Axes over which experts are spread: each rank holds some, and rows travel to them and back."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from torch import fx

from ...core.annotations import facts, leaf, num_bytes, shape, tensor_inputs, values
from ...core.errors import CompileError
from ...core.sharding import AxisType, I, P, S, Shard, plain
from ...ir.program import Axis, Strategy
from ...ops.experts.scaled_groups import EXPERT_LAYERS


def expert_parameters(graph: fx.Graph) -> frozenset[fx.Node]:
    """The parameters that have one part per expert: weights and biases of ``expert_linear``."""
    layers = [node for node in graph.nodes if node.op == "call_function" and node.target in EXPERT_LAYERS]
    return frozenset(given for node in layers for given in tensor_inputs(node)[2:] if leaf(given) is not None)


def dispatched_bytes(graph: fx.Graph, repeats: Mapping[fx.Node, int]) -> int:
    """Of the rows that go to experts, and of what comes back: in a mixture of layers with the same ids, those of the
    first and the results of the last. ``repeats``: how many nodes a node stands for."""
    mixtures: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function" and node.target in EXPERT_LAYERS:
            mixtures[node.all_input_nodes[1]].append(node)
    ends = [(layers[0].all_input_nodes[0], layers[-1]) for layers in mixtures.values()]
    return sum(num_bytes(values(node)[0]) * repeats.get(last, 1) for first, last in ends for node in (first, last))


def check_experts(graph: fx.Graph, asked: Sequence[str]) -> None:
    """Raises: CompileError QN204 if a plan spreads experts and the model has none."""
    if asked and not expert_parameters(graph):
        raise CompileError(
            "QN204",
            f"the plan spreads experts over {' and '.join(asked)}, and the model has no expert_linear",
            fix="leave experts out, or shard parameters by name (see docs/sharding.md)",
        )


def travelling(node: fx.Node, options: Iterable[Strategy], axis: Axis) -> tuple[Strategy, ...]:
    """The strategies in which each rank has rows of its own and experts of its own.

    Raises:
        CompileError: QN203 if the axes before it have split the experts, and what is left does not divide.
    """
    found = tuple(s for s in options if s.exchanges)
    if not found:
        raise CompileError(
            "QN203",
            f"{shape(tensor_inputs(node)[2])[0]} experts cannot be spread over {axis.name}={axis.size}: what is left "
            "of them after the axes before it must divide",
            where=facts(node).where,
            fix="spread experts over one axis, or over sizes whose product divides their number",
        )
    return found


def sliced(node: fx.Node, options: Iterable[Strategy], axis: Axis) -> tuple[Strategy, ...]:
    """For rows that travel over another axis, and that all ranks of ``axis`` have: the strategies in which each of
    these sends a slice of their features, which are gathered where they arrive; and those in which terms of results are
    added up and scattered there, before they return (after Singh et al. 2023, "A Hybrid Tensor-Expert-Data Parallelism
    Approach to Optimize Mixture-of-Experts Training"). Not where ranks of ``axis`` have other experts, as each orders
    rows by its own."""
    wide = shape(tensor_inputs(node)[0])[1] % axis.size == 0, shape(node)[1] % axis.size == 0
    found = list[Strategy]()
    for one in options:
        if not one.splits or one.uneven or splits_experts(one):
            continue
        read, made = one.inputs[0], one.outputs[0]
        arriving: list[AxisType] = [read, *([S(1)] if wide[0] and plain(read) is I else [])]
        leaving: list[AxisType] = [made, *([S(1)] if wide[1] and made is P else [])]
        for a, b in itertools.product(arriving, leaving):
            if (a, b) != (read, made):
                found.append(replace(one, inputs=(a, *one.inputs[1:]), outputs=(b,), inside=(read, made)))
    return tuple(found)


def hops(axes: Sequence[Axis], chosen: Sequence[Strategy]) -> list[tuple[Axis, int]]:
    """The axes on which the rows of an ``expert_linear`` travel, and in how many ways the axes before each split the
    experts."""
    found, ways = [], 1
    for axis, strategy in zip(axes, chosen, strict=True):
        if strategy.exchanges:
            found.append((axis, ways))
        if splits_experts(strategy):
            ways *= axis.size
    return found


Move = tuple[str, int, str, str]  # an axis, its size, and the types before and after


def moved_there(axes: Sequence[Axis], chosen: Sequence[Strategy]) -> tuple[list[Move], list[Move]]:
    """How the rows of an ``expert_linear`` are moved where they arrive, and what is made of them before it returns."""
    arriving, leaving = list[Move](), list[Move]()
    for axis, one in zip(axes, chosen, strict=True):
        if one.inside is None:
            continue
        read, made = one.inside
        for found, before, after in ((arriving, one.inputs[0], read), (leaving, made, one.outputs[0])):
            if before != after:
                found.append((axis.name, axis.size, str(before), str(after)))
    return arriving, leaving


def splits_experts(strategy: Strategy) -> bool:
    return isinstance(kind := strategy.inputs[2], Shard) and kind.dim == 0
