"""Operators that keep a program from running on a part of the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import fx

from ...core.annotations import is_getitem, leaf, origin, shape, tensor_inputs
from ...ops.catalog import op_spec
from ...ops.rules.notation import Factors

Value = tuple[fx.Node, int]
RowState = int | Literal["sum"]  # the dim whose outermost part is rows, or a sum over rows: each part has a term


def coupling(graph: fx.Graph, factors: Mapping[fx.Node, Factors]) -> tuple[fx.Node, str] | None:
    """Return the first operator that cannot be computed for each part of the batch on its own, and why.

    Its rule does not split the dim of rows, or it needs a finished sum over all rows. None where no operator does.
    """
    return next(iter(couplings(graph, factors).items()), None)


def couplings(graph: fx.Graph, factors: Mapping[fx.Node, Factors]) -> dict[fx.Node, str]:
    """Return all operators that need values of the whole batch, and those that read their results, with the reason."""
    states: dict[Value, RowState] = {}
    reasons: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op == "output" or is_getitem(node):
            continue
        rule_factors, info = factors[node], leaf(node)
        if info is not None:
            if info.batched and rule_factors.outputs[0]:
                states[node, 0] = 0
            continue
        coupled_source = next((source for source, _ in map(origin, tensor_inputs(node)) if source in reasons), None)
        if coupled_source is not None:
            reasons[node] = f"{node.target} reads what {coupled_source.target} makes of the whole batch"
            continue
        if op_spec(node).user_derivative == "declaration":
            continue  # its result has no value
        input_states = [states.get(origin(source)) for source in tensor_inputs(node)]
        if all(state is None for state in input_states):
            continue
        result_states = _states(node, rule_factors, input_states)
        if isinstance(result_states, str):
            reasons[node] = result_states
        else:
            states.update(((node, k), state) for k, state in enumerate(result_states))
    return reasons


def _states(node: fx.Node, rule_factors: Factors, input_states: list[RowState | None]) -> list[RowState] | str:
    """Return the state of each result of an operator, or the reason why it needs all rows."""
    if "sum" in input_states:
        return _needs_finished_sum(node, rule_factors, input_states) or ["sum" for _ in rule_factors.outputs]
    row_factors = _row_factors(rule_factors, input_states)
    if not row_factors or not row_factors.isdisjoint(rule_factors.whole):
        return f"the rule of {node.target} does not split the dim of the batch in {_shapes(node)}"
    if len(row_factors) > 1:
        return f"{node.target} brings rows together with other rows ({_shapes(node)})"
    row_dims = [
        [d for d, names in enumerate(dims) if names and names[0] in row_factors] for dims in rule_factors.outputs
    ]
    return [dims[0] if dims else "sum" for dims in row_dims]


def _row_factors(rule_factors: Factors, input_states: list[RowState | None]) -> set[str]:
    names = set[str]()
    for dims, state in zip(rule_factors.inputs, input_states, strict=True):
        if isinstance(state, int) and dims[state]:
            names.add(dims[state][0])
    return names


def _needs_finished_sum(node: fx.Node, rule_factors: Factors, input_states: list[RowState | None]) -> str:
    """Return why ``node`` cannot read unfinished sums over rows.

    The reason is empty where the node is linear in the inputs that are sums.
    """
    sums = {i for i, state in enumerate(input_states) if state == "sum"}
    rows = {i for i, state in enumerate(input_states) if state not in (None, "sum")}
    if not rows and any(sums <= set(group) for group in (*rule_factors.linear, rule_factors.additive)):
        return ""
    names = ", ".join(dict.fromkeys(str(origin(tensor_inputs(node)[i])[0].target) for i in sorted(sums)))
    return f"{node.target} needs the sum over all rows that comes out of {names}"


def _shapes(node: fx.Node) -> str:
    return " and ".join(str(list(shape(source))) for source in tensor_inputs(node)[:2])
