"""Which operator keeps a program from running on a part of the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import fx

from ...core.annotations import is_getitem, leaf, origin, shape, tensor_inputs
from ...ops.rules.notation import Factors

Value = tuple[fx.Node, int]
State = int | Literal["sum"]  # the dim whose outermost part is rows, or a sum over rows: each part has a term


def coupling(graph: fx.Graph, factors: Mapping[fx.Node, Factors]) -> tuple[fx.Node, str] | None:
    """The first operator that cannot follow when each part of the batch is computed on its own, and why: its rule
    keeps the dim of rows whole, or it needs a sum over all rows that is not finished. None where there is no such one.
    """
    states: dict[Value, State] = {}
    for node in graph.nodes:
        if node.op == "output" or is_getitem(node):
            continue
        spec, known = factors[node], leaf(node)
        if known is not None:
            if known.batched and spec.outputs[0]:
                states[node, 0] = 0
            continue
        given = [states.get(origin(source)) for source in tensor_inputs(node)]
        if all(state is None for state in given):
            continue
        if "sum" in given:
            why = _after_a_sum(node, spec, given)
            if why:
                return node, why
            states.update(dict.fromkeys(((node, k) for k in range(len(spec.outputs))), "sum"))
            continue
        rows = {
            dims[state][0]
            for dims, state in zip(spec.inputs, given, strict=True)
            if isinstance(state, int) and dims[state]
        }
        if not rows or not rows.isdisjoint(spec.whole):
            return node, f"the rule of {node.target} does not split the dim of the batch in {_shapes(node)}"
        if len(rows) > 1:
            return node, f"{node.target} brings rows together with other rows ({_shapes(node)})"
        for k, dims in enumerate(spec.outputs):
            found = [d for d, names in enumerate(dims) if names and names[0] in rows]
            states[node, k] = found[0] if found else "sum"
    return None


def _after_a_sum(node: fx.Node, spec: Factors, given: list[State | None]) -> str:
    """Why ``node`` cannot read a sum of which there are only terms; nothing where it is linear in what are sums."""
    sums = {i for i, state in enumerate(given) if state == "sum"}
    rows = {i for i, state in enumerate(given) if state not in (None, "sum")}
    if not rows and any(sums <= set(group) for group in (*spec.linear, spec.additive)):
        return ""
    names = ", ".join(dict.fromkeys(str(origin(tensor_inputs(node)[i])[0].target) for i in sorted(sums)))
    return f"{node.target} needs the sum over all rows that comes out of {names}"


def _shapes(node: fx.Node) -> str:
    return " and ".join(str(list(shape(source))) for source in tensor_inputs(node)[:2])
