"""Replace ``torch.no_grad`` in a traced graph by ``detach``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx

from ...compat.torch import OpOverload, schema
from ...compat.torch_func import set_grad
from ...ops.catalog import op_spec
from .memory import itself

WITHOUT_GRADIENTS = "quintnet_without_gradients"  # key of the meta of nodes that are computed under no_grad


def without_switches(graph: fx.Graph, enabled: bool) -> Mapping[str, str]:
    """Remove the operators that switch gradients off and on.

    Nodes elsewhere read values that are computed without gradients through ``detach``, and so does an in-place operator
    without gradients read its inputs. A tensor from elsewhere that it changes keeps its gradient. torch would make
    higher-order operators of these regions, and forget some inside of autocast.

    Args:
        graph: The graph to change.
        enabled: Whether gradients are on at the beginning.

    Returns:
        New names of results of the graph, by old name.
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
        replacement = itself(node)
        if WITHOUT_GRADIENTS in replacement.meta:
            with graph.inserting_after(node):
                replacement = _detached(graph, node, node)
            del replacement.meta[WITHOUT_GRADIENTS]
        for user in elsewhere:
            user.replace_input_with(node, replacement)
        renamed[node.name] = replacement.name
    return renamed


def _detached(graph: fx.Graph, x: fx.Node, place: fx.Node) -> fx.Node:
    """Append a ``detach`` of ``x`` with the user's line of ``place``: a parameter has none."""
    node = graph.call_function(torch.ops.aten.detach.default, (x,))
    node.meta = {**place.meta, "val": x.meta["val"], WITHOUT_GRADIENTS: True}
    return node


def _detach_what_is_read(node: fx.Node) -> None:
    """Let an operator that writes to a tensor read all other tensors through ``detach``."""
    if not isinstance(node.target, OpOverload) or not schema(node.target).is_mutable:
        return
    arguments = schema(node.target).arguments
    targets = {
        argument.name for argument in arguments if argument.alias_info is not None and argument.alias_info.is_write
    }

    def detached(x: fx.Node) -> fx.Node:
        if not isinstance(x.meta.get("val"), Tensor):
            return x
        with node.graph.inserting_before(node):
            return _detached(node.graph, x, node)

    positional = zip(arguments, node.args, strict=False)
    node.args = tuple(x if argument.name in targets else fx.map_arg(x, detached) for argument, x in positional)
    node.kwargs = {name: x if name in targets else fx.map_arg(x, detached) for name, x in node.kwargs.items()}
