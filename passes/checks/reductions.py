"""Check that no partial sum is rounded before ranks add it up, forward or backward, whatever chose its types. It
reads the graph by itself."""

from __future__ import annotations

import torch
from torch import fx

from ...core.annotations import facts, leaf, needs_grad, tensor_inputs, value
from ...core.errors import CompileError
from ...core.sharding import P, R
from ...ir.program import LocalProgram
from .tables import rounds

aten = torch.ops.aten


def check_reductions(local: LocalProgram) -> None:
    """A cast to fewer bits must not read a partial sum. Nor may a cast to more bits read a replicated activation on an
    axis over which ranks exchange activations: the gradient that it casts back would be a partial sum.

    Raises:
        CompileError: QN214 with the cast and the axis.
    """
    sharded = local.staged.sharded
    activations = _activations(sharded.program.graph)
    for node, strategies in sharded.strategies.items():
        if node.target is not aten._to_copy.default:
            continue
        before, after = value(tensor_inputs(node)[0]).dtype, value(node).dtype
        for axis, strategy in zip(sharded.axes, strategies, strict=True):
            kind = strategy.inputs[0]
            if kind is P and rounds(before, after):
                raise _fail(node, "a sum", before, after, axis.name)
            exchanged = axis.role in ("model", "context") and node in activations and needs_grad(node)
            if kind is R and rounds(after, before) and exchanged:
                raise _fail(node, "the sum of gradients", after, before, axis.name)


def _fail(node: fx.Node, what: str, before: torch.dtype, after: torch.dtype, axis: str) -> CompileError:
    wide, low = (str(dtype).removeprefix("torch.") for dtype in (before, after))
    return CompileError(
        "QN214",
        f"{node.name} rounds each term of {what} over {axis} from {wide} ({before.itemsize} bytes) to {low} "
        f"({after.itemsize} bytes), and then they are added up",
        where=facts(node).where,
        fix="take rules=[...] for _to_copy back: its own rule reduces first",
    )


def _activations(graph: fx.Graph) -> frozenset[fx.Node]:
    """What depends on the batch and on a parameter: what can be reached from both."""
    leaves = [(n, found) for n in graph.nodes if n.op == "placeholder" and (found := leaf(n)) is not None]
    batched = _reached([n for n, found in leaves if found.batched])
    return batched & _reached([n for n, found in leaves if found.kind == "parameter"])


def _reached(starts: list[fx.Node]) -> frozenset[fx.Node]:
    found, todo = set[fx.Node](), list(starts)
    while todo:
        new = set(todo.pop().users) - found
        found |= new
        todo += new
    return frozenset(n for n in found if n.op == "call_function")
