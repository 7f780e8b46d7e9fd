"""Which operator keeps a program from running on a part of the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from torch import fx

from ...core.annotations import is_getitem, leaf, origin, shape, tensor_inputs
from ...ops.derivatives.user_derivatives import declare_gradient
from ...ops.rules.notation import Factors

Value = tuple[fx.Node, int]
State = int | Literal["sum"]  # the dim whose outermost part is rows, or a sum over rows: each part has a term


def coupling(graph: fx.Graph, factors: Mapping[fx.Node, Factors]) -> tuple[fx.Node, str] | None:
    """The first operator that cannot follow when each part of the batch is computed on its own, and why: its rule
    keeps the dim of rows whole, or it needs a sum over all rows that is not finished. None where there is no such one.
    """
    return next(iter(couplings(graph, factors).items()), None)


def couplings(graph: fx.Graph, factors: Mapping[fx.Node, Factors]) -> dict[fx.Node, str]:
    """All operators that need values of the whole batch, and what is made of these. Of the first ones, why; of what
    reads another's result, that it does."""
    states: dict[Value, State] = {}
    found: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op == "output" or is_getitem(node):
            continue
        spec, known = factors[node], leaf(node)
        if known is not None:
            if known.batched and spec.outputs[0]:
                states[node, 0] = 0
            continue
        whole = next((s for s in (origin(n)[0] for n in tensor_inputs(node)) if s in found), None)
        if whole is not None:
            found[node] = f"{node.target} reads what {whole.target} makes of the whole batch"
            continue
        if node.target is declare_gradient:
            continue  # what it returns has no value
        given = [states.get(origin(source)) for source in tensor_inputs(node)]
        if all(state is None for state in given):
            continue
        made = _states(node, spec, given)
        if isinstance(made, str):
            found[node] = made
        else:
            states.update(((node, k), state) for k, state in enumerate(made))
    return found


def _states(node: fx.Node, spec: Factors, given: list[State | None]) -> list[State] | str:
    """What the results of an operator are, whose inputs are ``given``; why it has none where it needs all rows."""
    if "sum" in given:
        return _after_a_sum(node, spec, given) or ["sum" for _ in spec.outputs]
    rows = {
        dims[state][0] for dims, state in zip(spec.inputs, given, strict=True) if isinstance(state, int) and dims[state]
    }
    if not rows or not rows.isdisjoint(spec.whole):
        return f"the rule of {node.target} does not split the dim of the batch in {_shapes(node)}"
    if len(rows) > 1:
        return f"{node.target} brings rows together with other rows ({_shapes(node)})"
    found = [[d for d, names in enumerate(dims) if names and names[0] in rows] for dims in spec.outputs]
    return [dims[0] if dims else "sum" for dims in found]


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
