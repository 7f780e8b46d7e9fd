"""The results of a captured graph that become the values of parameters, and where they are computed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

from ...core.annotations import Leaf
from ...ops.derivatives.user_derivatives import after_gradients
from ..places import LEAF, WHERE


def store(graph: fx.Graph, changed: Sequence[fx.Node]) -> None:
    """Prepare the last results of ``graph``, which are the new values of the leaves ``changed``.

    That of a trained parameter is no part of the step's derivative, and that of any parameter is an operator's: a
    pipeline stage that has one parameter need not have another one. What is made of parameters alone is computed where
    it is read first, so that a loop over all of a model's parameters is not in one stage.
    """
    out = graph.output_node()
    results: list[fx.Node] = list(out.args[0])  # type: ignore[arg-type]
    first = len(results) - len(changed)
    parameters = [(i, leaf) for i, leaf in enumerate(changed, first) if leaf.meta[LEAF].kind == "parameter"]
    if not parameters:
        return
    _sink(graph, out)
    for position, leaf in parameters:
        found: Leaf = leaf.meta[LEAF]
        made = results[position]
        with graph.inserting_before(made.next if made.op == "call_function" else out):
            if found.trainable:
                made = _made(graph, torch.ops.aten.detach.default, (made,), made)
            results[position] = _made(graph, after_gradients, (made, []), made)
    out.args = (tuple(results),)


def _made(graph: fx.Graph, target: object, args: tuple[object, ...], like: fx.Node) -> fx.Node:
    new = graph.call_function(target, args)  # type: ignore[arg-type]
    new.meta = {"val": like.meta["val"], WHERE: like.meta[WHERE]}
    return new


def _sink(graph: fx.Graph, out: fx.Node) -> None:
    """Move what depends on a parameter, and not on the batch, to the place where it is read first."""
    own, rows = set[fx.Node](), set[fx.Node]()
    for node in graph.nodes:
        found: Leaf | None = node.meta.get(LEAF)
        if found is not None:
            (own if found.kind == "parameter" else rows if found.kind == "input" else set()).add(node)
        if own.intersection(node.all_input_nodes):
            own.add(node)
        if rows.intersection(node.all_input_nodes):
            rows.add(node)
    for node in reversed(list(graph.nodes)):
        users = [user for user in node.users if user is not out]
        if node.op == "call_function" and node in own - rows and users and isinstance(node.meta["val"], Tensor):
            min(users).prepend(node)
