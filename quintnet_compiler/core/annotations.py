"""Facts about graph nodes, which lie in ``node.meta``. Other files copy that whole, or read torch's own entries."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, fx

from ..compat.torch import schema_or_none, storage_key
from .errors import Where

Value = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Leaf:
    """What a placeholder stands for.

    ``name`` is the original name (parameters, buffers) or the path in the batch (inputs); ``batched``: an input
    whose dim 0 is the batch. ``held``: the dtype in which ranks hold a parameter whose operators read a copy of fewer
    bits, made once a step (None: there is no copy). The value of a leaf is what operators read. A ``cache`` stays on
    its ranks from one run to the next; one operator writes to it.
    """

    kind: Literal["parameter", "buffer", "constant", "input", "cache"]
    name: str
    trainable: bool = False
    batched: bool = False
    held: torch.dtype | None = None


@dataclass(frozen=True)
class Facts:
    """What is known of a node: its fake value(s), where the user wrote it, whether gradients flow through it.

    ``documents``: of attention whose mask has documents, and of what is made of it: their expected lengths, see
    :class:`..ir.plan.Plan`. Prices alone read them.
    """

    value: Value
    where: Where = Where()
    needs_grad: bool = False
    leaf: Leaf | None = None
    phase: Literal["forward", "backward"] = "forward"
    documents: tuple[int, ...] = ()


_KEY = "quintnet"


def facts(node: fx.Node) -> Facts:
    found: Facts = node.meta[_KEY]
    return found


def known(node: fx.Node) -> bool:
    """Whether there are facts about a node (generated functions have a few nodes of their own)."""
    return _KEY in node.meta


def annotate(node: fx.Node, new: Facts) -> fx.Node:
    node.meta[_KEY] = new
    if isinstance(new.value, Tensor):
        node.meta["val"] = new.value  # what torch's own tools (printers, drawers, inductor) read
    return node


def value(node: fx.Node) -> Tensor:
    """The fake tensor of a node with one output."""
    found = facts(node).value
    assert isinstance(found, Tensor), f"{node} has several outputs"
    return found


def values(node: fx.Node) -> tuple[Tensor, ...]:
    """The fake tensors of a node, one or several."""
    found = facts(node).value
    return (found,) if isinstance(found, Tensor) else found


def shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(value(node).shape)


def needs_grad(node: fx.Node) -> bool:
    return facts(node).needs_grad


def leaf(node: fx.Node) -> Leaf | None:
    return facts(node).leaf


def copied_from(node: fx.Node) -> fx.Node | None:
    """The parameter that this is a copy of, in the dtype that operators read; see :class:`Leaf`."""
    source = node.args[0] if node.target is torch.ops.aten._to_copy.default else None
    found = leaf(source) if isinstance(source, fx.Node) else None
    return source if found is not None and found.held is not None else None  # type: ignore[return-value]


def num_bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def size(count: float) -> str:
    """Bytes, for people.

    >>> size(1536), size(12), size(0)
    ('1.50 KiB', '12 B', '0 B')
    """
    for factor, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= factor:
            return f"{count / factor:.2f} {unit}"
    return f"{count:.0f} B"


def tensor_inputs(node: fx.Node) -> list[fx.Node]:
    """The node's tensor arguments in order, with repeats."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def origin(node: fx.Node) -> tuple[fx.Node, int]:
    """The operator that makes ``node``'s value, and which of its outputs it is (looks through getitem)."""
    if is_getitem(node):
        source, index = node.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        return source, index
    return node, 0


def copies(node: fx.Node) -> bool:
    """Whether a node that may be a view has to copy after all."""
    if node.target not in (torch.ops.aten.reshape.default, torch.ops.aten.contiguous.default):
        return False
    x = value(tensor_inputs(node)[0])
    if node.target is torch.ops.aten.contiguous.default:
        wanted = node.kwargs.get("memory_format", torch.contiguous_format)
        return not (isinstance(wanted, torch.memory_format) and x.is_contiguous(memory_format=wanted))
    given = torch.empty_strided(x.shape, x.stride(), device="meta")
    return storage_key(given.reshape(value(node).shape)) != storage_key(given)


def viewed(node: fx.Node) -> fx.Node | None:
    """What ``node`` is a view of, if it is one."""
    made = origin(node)[0]
    returns = getattr(schema_or_none(made.target), "returns", ())
    if not any(r.alias_info is not None for r in returns) or not made.all_input_nodes or copies(made):
        return None
    return made.all_input_nodes[0]


def memory_of(node: fx.Node) -> fx.Node:
    """The node in whose memory ``node``'s value lies: itself, or what it is a view of."""
    while (whole := viewed(node)) is not None:
        node = whole
    return node


def is_float(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()
