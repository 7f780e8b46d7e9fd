"""``x.data = y`` in a traced forward: a write to ``x``, if new memory would make no difference."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.autograd.graph import increment_version

from ...core.errors import CompileError
from ...ops.catalog import op_spec
from ...ops.define import define_operator
from ..places import where_of
from .memory import itself, same_memory, written_arguments

aten = torch.ops.aten
# while forward is traced; ``place_data`` makes it a copy
_put_data = define_operator(
    "put_data(Tensor(a!) x, Tensor value) -> ()", lambda x, value: None, lambda x, value: x.copy_(value) and None
)


def put_data(x: Tensor, value: Tensor) -> bool:
    """Record ``x.data = value`` and return True, if that leaves shape, strides, dtype and device as they are."""
    alike = (x.shape, x.stride(), x.dtype, x.device) == (value.shape, value.stride(), value.dtype, value.device)
    if alike:
        with torch.no_grad():
            _put_data(x.detach(), value.detach())
            increment_version(x)
    return alike


def place_data(graph: fx.Graph) -> None:
    """Turn each recorded assignment into a copy in ``graph``, which has in-place operators.

    Raises:
        CompileError: QN110 if a view of the old memory, or another value in the new memory, would differ.
    """
    nodes = list(graph.nodes)
    assignments = [(place, node) for place, node in enumerate(nodes) if node.target is _put_data]
    if not assignments:
        return
    memory: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        source = same_memory(node)
        memory[node] = memory[source] if source is not None else node
    for place, node in assignments:
        x, value = node.args
        assert isinstance(x, fx.Node) and isinstance(value, fx.Node)
        if _whole(value) is not _whole(x):
            if _differs(nodes, place, memory):
                raise CompileError(
                    "QN110",
                    "the forward pass assigns .data, and another tensor has the same memory",
                    where=where_of(node),
                    fix="assign a copy, .clone(), or write in place: x.data.copy_(value)",
                )
            with graph.inserting_before(node):
                copy = graph.call_function(aten.copy_.default, (x, value))
                copy.meta = {**node.meta, "val": x.meta["val"]}
        graph.erase_node(node)


def _differs(nodes: list[fx.Node], place: int, memory: dict[fx.Node, fx.Node]) -> bool:
    """Return whether a copy would differ from the assignment at ``place``. ``memory``: the first node in a memory."""
    x, value = nodes[place].args
    assert isinstance(x, fx.Node) and isinstance(value, fx.Node) and isinstance(x.args[0], fx.Node)
    old, new, tensor = memory[x], memory[value], itself(x.args[0])
    later = nodes[place + 1 :]
    read = {source for user in later for source in user.all_input_nodes}
    writes = {memory[source] for user in later for source in written_arguments(user)}
    views = {n for n in nodes[:place] if memory[n] is old and itself(n) is not tensor}
    others = {n for n in read if memory[n] is new}
    return new.op == "placeholder" or bool(views & read) or bool(others and writes & {old, new})


def _whole(node: fx.Node) -> fx.Node:
    """Return the tensor that a value is the whole of, through ``detach`` and in-place operators."""
    while (source := same_memory(node)) is not None and (
        op_spec(node).detaches == "of its own" or [*written_arguments(node)]
    ):
        node = source
    return node
