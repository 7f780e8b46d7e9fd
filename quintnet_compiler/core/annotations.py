"""Facts about graph nodes, stored in ``node.meta``.

Other files copy ``node.meta`` whole, or read torch's own entries.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, fx

from ..compat.torch import schema_or_none, storage_key
from ..compat.torch_codegen import SHIPPED
from .errors import Where

Value = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Leaf:
    """What a placeholder stands for. Its value is what operators read.

    Attributes:
        kind: a ``cache`` stays on its ranks from one run to the next; one operator writes to it.
        name: the original name (parameters, buffers), or the path in the batch (inputs).
        trainable: whether it is a parameter that is trained.
        batched: whether dim 0 of an input is the batch.
        held: the dtype in which ranks store a parameter whose operators read a copy of fewer bits, cast once a step;
            None if there is no copy.
    """

    kind: Literal["parameter", "buffer", "constant", "input", "cache"]
    name: str
    trainable: bool = False
    batched: bool = False
    held: torch.dtype | None = None


@dataclass(frozen=True)
class Facts:
    """What the compiler knows of a node.

    Attributes:
        value: its fake tensor or tensors.
        where: the place in the user's code.
        needs_grad: whether gradients flow through it.
        leaf: what a placeholder stands for.
        phase: the half of the step that computes it.
        documents: the expected lengths of documents (:class:`..ir.plan.Plan`), for attention whose mask has documents
            and for values computed from it. Only prices read them.
    """

    value: Value
    where: Where = Where()
    needs_grad: bool = False
    leaf: Leaf | None = None
    phase: Literal["forward", "backward"] = "forward"
    documents: tuple[int, ...] = ()


_KEY = "quintnet"


def facts(node: fx.Node) -> Facts:
    """Return the facts of a node."""
    entry: Facts = node.meta[_KEY]
    return entry


def has_facts(node: fx.Node) -> bool:
    """Return whether a node has facts. Generated functions have a few nodes without."""
    return _KEY in node.meta


def annotate(node: fx.Node, new: Facts) -> fx.Node:
    """Attach facts to a node, and return it."""
    node.meta[_KEY] = new
    if isinstance(new.value, Tensor):
        node.meta["val"] = new.value  # what torch's own tools (printers, drawers, inductor) read
    return node


def value(node: fx.Node) -> Tensor:
    """Return the fake tensor of a node with one output."""
    tensor = facts(node).value
    assert isinstance(tensor, Tensor), f"{node} has several outputs"
    return tensor


def values(node: fx.Node) -> tuple[Tensor, ...]:
    """Return the fake tensors of a node, one or several."""
    tensors = facts(node).value
    return (tensors,) if isinstance(tensors, Tensor) else tensors


def shape(node: fx.Node) -> tuple[int, ...]:
    """Return the shape of a node with one output."""
    return tuple(value(node).shape)


def needs_grad(node: fx.Node) -> bool:
    """Return whether gradients flow through a node."""
    return facts(node).needs_grad


def leaf(node: fx.Node) -> Leaf | None:
    """Return what a placeholder stands for; None for operators."""
    return facts(node).leaf


def copied_from(node: fx.Node) -> fx.Node | None:
    """Return the parameter whose low-precision copy ``node`` is (:attr:`Leaf.held`), or None."""
    source = node.args[0] if node.target is torch.ops.aten._to_copy.default else None
    source_leaf = leaf(source) if isinstance(source, fx.Node) else None
    return source if source_leaf is not None and source_leaf.held is not None else None  # type: ignore[return-value]


def num_bytes(x: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return x.numel() * x.element_size()


def format_bytes(count: float) -> str:
    """Format a number of bytes for people.

    >>> format_bytes(1536), format_bytes(12), format_bytes(0)
    ('1.50 KiB', '12 B', '0 B')
    """
    for factor, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:.0f} B"


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """Return the node's tensor arguments in order, with repeats."""
    inputs: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), inputs.append)
    return inputs


def is_getitem(node: fx.Node) -> bool:
    """Return whether a node takes one output of an operator with several."""
    return node.op == "call_function" and node.target is operator.getitem


def origin(node: fx.Node) -> tuple[fx.Node, int]:
    """Return the operator that computes ``node``, and which of its outputs ``node`` is; looks through getitem."""
    if is_getitem(node):
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        return source, index
    return node, 0


def copies(node: fx.Node) -> bool:
    """Return whether an operator that may return a view has to copy (``reshape``, ``contiguous``)."""
    if node.target not in (torch.ops.aten.reshape.default, torch.ops.aten.contiguous.default):
        return False
    x = value(tensor_inputs(node)[0])
    if node.target is torch.ops.aten.contiguous.default:
        memory_format = node.kwargs.get("memory_format", torch.contiguous_format)
        return not (isinstance(memory_format, torch.memory_format) and x.is_contiguous(memory_format=memory_format))
    source = SHIPPED.empty_strided(x.shape, x.stride(), device="meta")
    return storage_key(source.reshape(value(node).shape)) != storage_key(source)


def viewed(node: fx.Node) -> fx.Node | None:
    """Return the node that ``node`` is a view of, or None."""
    producer = origin(node)[0]
    returns = getattr(schema_or_none(producer.target), "returns", ())
    if not any(r.alias_info is not None for r in returns) or not producer.all_input_nodes or copies(producer):
        return None
    return producer.all_input_nodes[0]


def memory_of(node: fx.Node) -> fx.Node:
    """Return the node whose memory holds ``node``'s value: itself, or the node that it is a view of."""
    while (base := viewed(node)) is not None:
        node = base
    return node


def is_float(x: Tensor) -> bool:
    """Return whether a tensor has a floating-point or a complex dtype."""
    return x.is_floating_point() or x.is_complex()


def operators_of_parameters(graph: fx.Graph) -> list[fx.Node]:
    """Return the operators that depend on a parameter, in order."""
    depends = depending_on_parameters(graph)
    return [node for node in graph.nodes if node in depends and node.op == "call_function" and not is_getitem(node)]


def depending_on_parameters(graph: fx.Graph) -> set[fx.Node]:
    """Return the parameters, and the nodes that depend on one."""
    depends: set[fx.Node] = set()
    for node in graph.nodes:
        node_leaf = leaf(node) if node.op == "placeholder" else None
        is_parameter = node_leaf is not None and node_leaf.kind == "parameter"
        if is_parameter or (node.op == "call_function" and not depends.isdisjoint(node.all_input_nodes)):
            depends.add(node)
    return depends


def ancestors(nodes: Sequence[fx.Node], ends: Set[fx.Node]) -> set[fx.Node]:
    """Return those of ``nodes``, in the graph's order, from which ``ends`` are computed, and ``ends`` themselves.

    An operator of several results comes with all of them: a function cannot return a tuple of results as one value.
    """
    reached = set(ends)
    for node in reversed(nodes):
        if node in reached:
            reached.update(node.all_input_nodes)
    return reached | {node for node in nodes if is_getitem(node) and node.args[0] in reached}
