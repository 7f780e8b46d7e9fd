"""Hooks of tensors in a traced graph: the hook stands between the tensor and everything that uses it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, KeysView, Mapping, Sequence
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
        end = _only_user([end for value in node.users for end in value.users], "end")
        declaration = None if end is None else _only_user(list(end.users), "declaration")
        if end is None or declaration is None or declaration.args[0] is not end:
            continue
        tokens = list(declaration.users)
        for reader in {reader for token in tokens for reader in token.users}:
            done: Any = reader.args[1]
            reader.args = reader.args[0], [token for token in done if token not in tokens]
        for unread in (*tokens, declaration, end, *node.users, node):
            graph.erase_node(unread)


def _only_user(users: Sequence[fx.Node], role: str) -> fx.Node | None:
    """Return the only one of ``users`` if it has this role in a user's derivative, else None."""
    return users[0] if len(users) == 1 and op_spec(users[0]).user_derivative == role else None


def _place(graph: fx.Graph, hook: fx.Node, refuse: Callable[[str], Any]) -> None:
    """Let all users of a tensor, but those that compute its hook, read the hook, which moves in front of them."""
    done: Any = hook.args[1]
    x: fx.Node = done[0].args[0].args[0]
    nodes = list(graph.nodes)
    place = {n: i for i, n in enumerate(nodes)}
    start = max([place[x], *(place[n] for n in nodes if n.op == "placeholder")])
    computes = _computed_after(start, hook, place)
    others = [user for user in x.users if user not in computes]
    if any(place[user] < place[hook] for user in others):
        if any(_is_read_outside(n, computes) for n in _depending_on(x, computes) if n is not hook):
            refuse("a hook of a tensor that reads what was made of that tensor")
        cursor = nodes[start]
        for n in computes:
            cursor.append(n)
            cursor = n
    for user in others:
        user.replace_input_with(x, hook)
    hook.target, hook.args = after_gradients, hook.args[:2]


def _computed_after(start: int, hook: fx.Node, place: Mapping[fx.Node, int]) -> KeysView[fx.Node]:
    """Return the nodes that compute a hook from what is there at ``start``, in order, with the hook."""
    computes, todo = {hook}, [hook]
    while todo:
        for source in todo.pop().all_input_nodes:
            if source not in computes and place[source] > start:
                computes.add(source)
                todo.append(source)
    return dict.fromkeys(sorted(computes, key=place.__getitem__)).keys()


def _depending_on(x: fx.Node, nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """Yield those of ``nodes``, which are in order, that are computed from ``x``."""
    depends = {x}
    for node in nodes:
        if any(source in depends for source in node.all_input_nodes):
            depends.add(node)
            yield node


def _is_read_outside(node: fx.Node, computes: Collection[fx.Node]) -> bool:
    """Return whether a value in a computation is one with a gradient, and is read outside of it."""
    value = node.meta.get("val")
    is_differentiable = isinstance(value, Tensor) and value.is_floating_point()
    return is_differentiable and any(user not in computes for user in node.users)
