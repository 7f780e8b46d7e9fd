"""The memory of values in a traced graph that has operators in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from ...compat.torch import OpOverload, pytree, schema, storage_key
from ...core.annotations import is_getitem


def written(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments that an operator writes to."""
    if not isinstance(node.target, OpOverload) or not schema(node.target).is_mutable:
        return
    arguments = schema(node.target).arguments
    given = {a.name: x for a, x in zip(arguments, node.args, strict=False)} | node.kwargs
    for argument in arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            found: list[fx.Node] = []
            fx.map_arg(given.get(argument.name), found.append)
            yield from found


def same_memory(node: fx.Node) -> fx.Node | None:
    """The argument whose memory a result has: that of a view, of a reshape that copies nothing, of an operator in
    place; None if a result has its own."""
    several: Any = node.args[0] if is_getitem(node) else node
    if node.op != "call_function" or (several is node and not isinstance(node.target, OpOverload)):
        return None
    mine = _keys(node)
    return next((x for x in (*written(several), *several.all_input_nodes) if mine & _keys(x)), None)


def itself(node: fx.Node) -> fx.Node:
    """The tensor that an operator in place returns after it has changed it."""
    while list(written(node)) and (source := same_memory(node)) is not None:
        node = source
    return node


def _keys(node: fx.Node) -> set[int]:
    leaves: list[Any] = pytree.tree_leaves(node.meta.get("val"))
    return {storage_key(x) for x in leaves if isinstance(x, Tensor)}


def statistics(node: fx.Node) -> list[fx.Node]:
    """The running statistics that a norm changes, which its schema does not say. Its results do not depend on them."""
    if not isinstance(node.target, OpOverload):
        return []
    names = [argument.name for argument in schema(node.target).arguments]
    arguments = dict(zip(names, node.args, strict=False)) | node.kwargs
    trains = arguments.get("training", arguments.get("use_input_stats", False))
    buffers = [arguments.get(name) for name in ("running_mean", "running_var")] if trains else []
    return [x for x in buffers if isinstance(x, fx.Node)]
