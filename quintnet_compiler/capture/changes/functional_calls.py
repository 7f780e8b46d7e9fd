"""Replace calls of operators that write to their arguments by calls of their functional forms.

    scaled_into(x, out)        ->        [new] = functional_form(x, out); out.copy_(new)

PyTorch makes the copies functional, as it does with all in-place operators, be ``out`` a value, a view or a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from ...compat.torch import OpOverload, pytree, storage_key
from ...core.annotations import is_getitem
from ...core.errors import CompileError
from ...ops.functional_forms import functional_form, writes_arguments, writing_operator
from ..places import where_of


def call_functional_forms(exported: ExportedProgram) -> None:
    """Replace the calls in a traced graph that has in-place operators.

    Raises:
        CompileError: QN105 for a call that writes to memory that another argument has, too.
    """
    graph = exported.graph
    for node in list(graph.nodes):
        if writes_arguments(node.target):
            _replace(graph, node)


def _replace(graph: fx.Graph, node: fx.Node) -> None:
    assert isinstance(node.target, OpOverload)
    try:
        form = functional_form(node.target)
    except CompileError as error:
        raise CompileError(error.code, error.message, where=where_of(node), fix=error.fix) from error
    writing = writing_operator(form)
    assert writing is not None
    arguments = writing.bind(node.args, node.kwargs)
    _check_memory(node, arguments, writing.written)
    written = [x for name in writing.written for x in _nodes(arguments.get(name))]
    own_results = [i for i, name in enumerate(writing.returned) if name is None]
    with graph.inserting_before(node):
        call = graph.call_function(form, node.args, node.kwargs)
        values = _values(node)
        call.meta = {**node.meta, "val": [*(values[i] for i in own_results), *(x.meta["val"] for x in written)]}
        results: dict[int, Any] = {place: _item(graph, call, i) for i, place in enumerate(own_results)}
        for i, x in enumerate(written, len(own_results)):
            new = _item(graph, call, i)
            copy = graph.call_function(torch.ops.aten.copy_.default, (x, new))
            copy.meta = {**node.meta, "val": x.meta["val"]}
    results |= {i: arguments[name] for i, name in enumerate(writing.returned) if name is not None}
    _use(graph, node, results)


def _values(node: fx.Node) -> list[Any]:
    value = node.meta.get("val")
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _item(graph: fx.Graph, call: fx.Node, position: int) -> fx.Node:
    item = graph.call_function(getitem, (call, position))
    item.meta = {**call.meta, "val": call.meta["val"][position]}
    return item


def _use(graph: fx.Graph, node: fx.Node, results: dict[int, Any]) -> None:
    """Let the users of a call use ``results``, and erase it."""
    for user in list(node.users):
        if is_getitem(user):
            user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
            graph.erase_node(user)
    if node.users:
        node.replace_all_uses_with(results[0])
    graph.erase_node(node)


def _nodes(argument: Any) -> list[fx.Node]:
    return [x for x in pytree.tree_leaves(argument) if isinstance(x, fx.Node)]


def _check_memory(node: fx.Node, arguments: dict[str, Any], written: tuple[str, ...]) -> None:
    """Raise CompileError if an operator writes to what it reads, or writes, by another argument."""
    tensors = [(name, x.meta["val"]) for name, argument in arguments.items() for x in _nodes(argument)]
    for i, (name, x) in enumerate(tensors):
        for other_name, other in tensors[:i]:
            if (name in written or other_name in written) and have_memory_in_common(x, other):
                raise CompileError(
                    "QN105",
                    f"{node.target} writes to {name!r} or {other_name!r}, which have the same memory",
                    where=where_of(node),
                    fix="call it with a copy of one of them: .clone()",
                )


def have_memory_in_common(x: Tensor, other: Tensor) -> bool:
    """Return whether two tensors may have memory in common: they do not if they are slices of one, or of two."""
    if storage_key(x) != storage_key(other):
        return False
    first, second = sorted((x, other), key=lambda tensor: int(tensor.storage_offset()))
    offset = int(second.storage_offset()) - int(first.storage_offset())
    numbers = [*first.stride(), *second.stride(), offset]
    if not all(isinstance(number, int) for number in numbers) or first.stride() != second.stride():
        return True
    dims = sorted(zip(first.stride(), first.shape, second.shape, strict=True), key=lambda dim: -dim[0])
    outer_stride = None
    for place, (stride, size, other_size) in enumerate(dims):
        index, offset = divmod(offset, stride) if stride else (0, offset)
        are_numbers = isinstance(size, int) and isinstance(other_size, int)
        inside = are_numbers and (outer_stride is None or (index + other_size) * stride <= outer_stride)
        if inside and index >= size and _fits(dims[place + 1 :], offset, stride):
            return False
        outer_stride = stride
    return True


def _fits(inner: Sequence[tuple[int, Any, Any]], offset: int, stride: int) -> bool:
    """Return whether both tensors have all that an index of a dim has within the dim's stride."""
    if not all(isinstance(n, int) for dim in inner for n in dim):
        return False
    first, second = (sum((dim[which] - 1) * dim[0] for dim in inner) for which in (1, 2))
    return first < stride and offset + second < stride
