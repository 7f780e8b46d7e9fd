"""The memory of values in a traced graph that has in-place operators."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from ...compat.torch import HigherOrderOperator, OpOverload, pytree, schema, storage_key
from ...core.annotations import is_getitem


def writes(node: fx.Node) -> bool:
    """Return whether an operator changes an argument (schemas omit the running statistics of most norms)."""
    if not isinstance(node.target, OpOverload):
        return isinstance(node.target, HigherOrderOperator)
    names = [argument.name for argument in schema(node.target).arguments]
    arguments = dict(zip(names, node.args, strict=False)) | node.kwargs
    return bool(schema(node.target).is_mutable) or arguments.get("running_mean") is not None


def written_arguments(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the arguments that an operator writes to."""
    if not isinstance(node.target, OpOverload) or not schema(node.target).is_mutable:
        return
    arguments = schema(node.target).arguments
    values = {a.name: x for a, x in zip(arguments, node.args, strict=False)} | node.kwargs
    for argument in arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            targets: list[fx.Node] = []
            fx.map_arg(values.get(argument.name), targets.append)
            yield from targets


def same_memory(node: fx.Node) -> fx.Node | None:
    """Return the argument whose memory a result has, or None if it has its own.

    It is that of a view, of a reshape that copies nothing, or of an in-place operator.
    """
    call: Any = node.args[0] if is_getitem(node) else node
    if node.op != "call_function" or (call is node and not isinstance(node.target, OpOverload)):
        return None
    keys = _keys(node)
    return next((x for x in (*written_arguments(call), *call.all_input_nodes) if keys & _keys(x)), None)


def itself(node: fx.Node) -> fx.Node:
    """Return the tensor that an in-place operator changes and returns, or ``node`` itself."""
    while list(written_arguments(node)) and (source := same_memory(node)) is not None:
        node = source
    return node


def _keys(node: fx.Node) -> set[int]:
    leaves: list[Any] = pytree.tree_leaves(node.meta.get("val"))
    return {storage_key(x) for x in leaves if isinstance(x, Tensor)}


def statistics(node: fx.Node) -> list[fx.Node]:
    """Return the running statistics that a norm changes, which its schema omits. Its results do not depend on them."""
    if not isinstance(node.target, OpOverload):
        return []
    names = [argument.name for argument in schema(node.target).arguments]
    arguments = dict(zip(names, node.args, strict=False)) | node.kwargs
    trains = arguments.get("training", arguments.get("use_input_stats", False))
    buffers = [arguments.get(name) for name in ("running_mean", "running_var")] if trains else []
    return [x for x in buffers if isinstance(x, fx.Node)]
