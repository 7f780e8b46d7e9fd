"""Where gradients are off (``torch.no_grad``) in a traced graph, as parts of the graph itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx

from ...compat.torch import OpOverload, schema
from ...compat.torch_func import set_grad
from ...ops.catalog import op_spec
from .memory import itself

WITHOUT_GRADIENTS = "quintnet_without_gradients"  # an entry of ``meta`` of what is computed there


def without_switches(graph: fx.Graph, enabled: bool) -> Mapping[str, str]:
    """Remove the operators that switch gradients off and on again. What is computed where they are off is read behind
    ``detach`` elsewhere, and so are the values that an in-place operator reads there. A tensor from elsewhere that is
    changed there stays what it is. torch would make operators of these parts, and forget some inside of autocast.

    Args:
        enabled: whether gradients are on at the beginning.

    Returns: for the names of results of the graph, those that take their places.
    """
    inside = []
    for node in list(graph.nodes):
        if node.target is set_grad:
            enabled = bool(node.args[0])
            graph.erase_node(node)
        elif not enabled and node.op == "call_function" and op_spec(node).inner_gradient != "start":
            node.meta[WITHOUT_GRADIENTS] = True  # a start has a gradient even there
            _detach_what_is_read(node)
            inside.append(node)
    renamed = {}
    for node in inside:
        elsewhere = [user for user in node.users if WITHOUT_GRADIENTS not in user.meta]
        if not elsewhere or not isinstance(node.meta.get("val"), Tensor):
            continue
        found = itself(node)
        if WITHOUT_GRADIENTS in found.meta:
            with graph.inserting_after(node):
                found = _detached(graph, node, node)
            del found.meta[WITHOUT_GRADIENTS]
        for user in elsewhere:
            user.replace_input_with(node, found)
        renamed[node.name] = found.name
    return renamed


def _detached(graph: fx.Graph, x: fx.Node, place: fx.Node) -> fx.Node:
    """``x`` behind ``detach``, at the place of ``place`` in the user's code: a parameter has none."""
    made = graph.call_function(torch.ops.aten.detach.default, (x,))
    made.meta = {**place.meta, "val": x.meta["val"], WITHOUT_GRADIENTS: True}
    return made


def _detach_what_is_read(node: fx.Node) -> None:
    """An operator that writes to a tensor reads all others behind ``detach``."""
    if not isinstance(node.target, OpOverload) or not schema(node.target).is_mutable:
        return
    arguments = schema(node.target).arguments
    kept = {given.name for given in arguments if given.alias_info is not None and given.alias_info.is_write}

    def detached(x: fx.Node) -> fx.Node:
        if not isinstance(x.meta.get("val"), Tensor):
            return x
        with node.graph.inserting_before(node):
            return _detached(node.graph, x, node)

    positional = zip(arguments, node.args, strict=False)
    node.args = tuple(x if given.name in kept else fx.map_arg(x, detached) for given, x in positional)
    node.kwargs = {name: x if name in kept else fx.map_arg(x, detached) for name, x in node.kwargs.items()}
