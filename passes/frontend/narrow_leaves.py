"""Program -> Program: parameters that the model reads through one cast to fewer bits are leaves of fewer bits."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from ...core.annotations import annotate, facts, value
from ...core.precision import narrows
from ...ir.program import Program
from ...ops.catalog import op_spec

aten = torch.ops.aten


def narrow_leaves(program: Program) -> Program:
    """Give each parameter whose only user is a cast that rounds the dtype of the cast.

    Ranks hold it in its own dtype (:attr:`...core.annotations.Leaf.held`), and exchange only the bits that are read.
    """
    casts = {node: cast for node, kind in program.leaves.items() if kind.kind == "parameter" and (cast := _cast(node))}
    if not casts:
        return program
    graph, new = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in program.graph.nodes:
        if node in casts.values():
            new[node] = new[node.args[0]]
        else:
            new[node] = graph.node_copy(node, lambda n: new[n])
        if node in casts:
            narrow = replace(program.leaves[node], held=value(node).dtype)
            annotate(new[node], replace(facts(node), value=value(casts[node]), leaf=narrow))
    graph.lint()
    return replace(program, graph=graph)


def _cast(node: fx.Node) -> fx.Node | None:
    """Return the cast that is a leaf's only user, or None. Gradients of two casts would be added in few bits."""
    user = next(iter(node.users), None)
    if user is None or len(node.users) > 1 or not op_spec(user).casts:
        return None
    only_casts = user.kwargs == {"dtype": value(user).dtype}
    return user if only_casts and narrows(value(node).dtype, value(user).dtype) else None
