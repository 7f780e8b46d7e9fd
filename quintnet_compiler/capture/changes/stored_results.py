"""Results of a captured graph that become the values of parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from ...core.annotations import Leaf
from ...ops.derivatives.user_derivatives import after_gradients
from ..places import LEAF, WHERE


def store(graph: fx.Graph, changed: Sequence[fx.Node]) -> None:
    """Prepare the last results of ``graph``, which are the new values of the leaves ``changed``.

    The new value of a trained parameter is detached, and that of any parameter is the result of an operator, so that a
    pipeline stage with one parameter need not have another one. Values that depend on parameters alone are computed
    where they are read first, so that a loop over all parameters of a model is not in one stage.
    """
    out = graph.output_node()
    results: list[fx.Node] = list(out.args[0])  # type: ignore[arg-type]
    first = len(results) - len(changed)
    parameters = [(i, leaf) for i, leaf in enumerate(changed, first) if leaf.meta[LEAF].kind == "parameter"]
    if not parameters:
        return
    _sink(graph, out)
    for position, leaf in parameters:
        parameter: Leaf = leaf.meta[LEAF]
        value = results[position]
        with graph.inserting_before(value.next if value.op == "call_function" else out):
            if parameter.trainable:
                value = _call(graph, torch.ops.aten.detach.default, (value,), value)
            results[position] = _call(graph, after_gradients, (value, []), value)
    out.args = (tuple(results),)


def _call(graph: fx.Graph, target: object, args: tuple[object, ...], like: fx.Node) -> fx.Node:
    new = graph.call_function(target, args)  # type: ignore[arg-type]
    new.meta = {"val": like.meta["val"], WHERE: like.meta[WHERE]}
    return new


def _sink(graph: fx.Graph, out: fx.Node) -> None:
    """Move values that depend on a parameter, and not on the batch, to the place where they are read first."""
    own, rows = set[fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        leaf: Leaf | None = node.meta.get(LEAF)
        if leaf is not None:
            (own if leaf.kind == "parameter" else rows if leaf.kind == "input" else set()).add(node)
        if own.intersection(node.all_input_nodes):
            own.add(node)
        if rows.intersection(node.all_input_nodes):
            rows.add(node)
    for node in reversed(list(graph.nodes)):
        users = [user for user in node.users if user is not out]
        if node.op == "call_function" and node in own - rows and users and isinstance(node.meta["val"], Tensor):
            min(users).prepend(node)
