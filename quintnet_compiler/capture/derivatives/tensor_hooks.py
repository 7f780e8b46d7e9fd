"""Hooks of tensors in a traced graph: the hook stands between the tensor and everything that uses it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor, fx

from ...ops.catalog import op_spec
from ...ops.derivatives.user_derivatives import after_gradients, hooked


def place_hooks(graph: fx.Graph, removed: Collection[int], refuse: Callable[[str], Any]) -> None:
    """Let all users of a tensor read its :data:`..ops.derivatives.user_derivatives.hooked`, earlier users, too.

    ``removed``: the numbers of hooks that were removed again. ``refuse``: raises an error. Of several hooks of one
    tensor, the first one sees the gradient first.
    """
    _drop_unread(graph)
    for node in reversed([n for n in graph.nodes if n.target is hooked]):
        if node.args[2] in removed:
            graph.erase_node(node)
            continue
        _place(graph, node, refuse)


def _drop_unread(graph: fx.Graph) -> None:
    """Remove values that would bring the gradients of a module's results to hooks, if no hook reads them.

    They are zeros (:class:`.module_hooks.ModuleHooks`) that only declare a gradient.
    """
    for node in [n for n in graph.nodes if op_spec(n).user_derivative == "tangent"]:
        ends = [end for value in node.users for end in value.users]
        declarations = [user for end in ends for user in end.users]
        if len(ends) != 1 or len(declarations) != 1 or op_spec(ends[0]).user_derivative != "end":
            continue
        if op_spec(declarations[0]).user_derivative != "declaration" or declarations[0].args[0] is not ends[0]:
            continue
        tokens = list(declarations[0].users)
        for reader in {reader for token in tokens for reader in token.users}:
            done: Any = reader.args[1]
            reader.args = reader.args[0], [token for token in done if token not in tokens]
        for unread in (*tokens, *declarations, *ends, *node.users, node):
            graph.erase_node(unread)


def _place(graph: fx.Graph, node: fx.Node, refuse: Callable[[str], Any]) -> None:
    done: Any = node.args[1]
    x: fx.Node = done[0].args[0].args[0]
    place = {n: i for i, n in enumerate(graph.nodes)}
    start = max([place[x], *(place[n] for n in graph.nodes if n.op == "placeholder")])
    mine, todo = {node}, [node]
    while todo:
        for source in todo.pop().all_input_nodes:
            if source not in mine and place[source] > start:
                mine.add(source)
                todo.append(source)
    ordered = sorted(mine, key=place.__getitem__)
    others = [user for user in x.users if user not in mine]
    if any(place[user] < place[node] for user in others):
        depends = {x}
        for n in ordered:
            if any(source in depends for source in n.all_input_nodes):
                depends.add(n)
                value = n.meta.get("val")
                used = any(user not in mine for user in n.users)
                if n is not node and used and isinstance(value, Tensor) and value.is_floating_point():
                    refuse("a hook of a tensor that reads what was made of that tensor")
        nodes = list(graph.nodes)
        cursor = nodes[start]
        for n in ordered:
            cursor.append(n)
            cursor = n
    for user in others:
        user.replace_input_with(x, node)
    node.target, node.args = after_gradients, node.args[:2]
