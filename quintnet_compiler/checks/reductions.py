"""Check that no partial sum is rounded before ranks add it up, forward or backward, whatever chose its types."""

from __future__ import annotations

import torch
from torch import fx

from ..core.annotations import facts, leaf, needs_grad, tensor_inputs, value
from ..core.errors import CompileError
from ..core.sharding import P, R
from ..ir.program import LocalProgram
from ..ops.catalog import op_spec
from .tables import rounds

aten = torch.ops.aten


def check_reductions(local: LocalProgram) -> None:
    """Check every cast.

    A cast to fewer bits must not read a partial sum. A cast to more bits must not read a replicated activation on an
    axis over which ranks exchange activations: the gradient that it casts back would be a partial sum.

    Raises:
        CompileError: QN214 with the cast and the axis.
    """
    sharded = local.staged.sharded
    activations = _activations(sharded.program.graph)
    for node, strategies in sharded.strategies.items():
        if not op_spec(node).casts:
            continue
        source, target = value(tensor_inputs(node)[0]).dtype, value(node).dtype
        for axis, strategy in zip(sharded.axes, strategies, strict=True):
            kind = strategy.inputs[0]
            if kind is P and rounds(source, target):
                raise _rounded_sum(node, "a sum", source, target, axis.name)
            exchanged = axis.role in ("model", "context") and node in activations and needs_grad(node)
            if kind is R and rounds(target, source) and exchanged:
                raise _rounded_sum(node, "the sum of gradients", target, source, axis.name)


def _rounded_sum(node: fx.Node, what: str, source: torch.dtype, target: torch.dtype, axis: str) -> CompileError:
    wide, low = (str(dtype).removeprefix("torch.") for dtype in (source, target))
    return CompileError(
        "QN214",
        f"{node.name} rounds each term of {what} over {axis} from {wide} ({source.itemsize} bytes) to {low} "
        f"({target.itemsize} bytes), and then they are added up",
        where=facts(node).where,
        fix="take rules=[...] for _to_copy back: its own rule reduces first",
    )


def _activations(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the nodes that depend on the batch and on a parameter."""
    leaves = [(n, tensor) for n in graph.nodes if n.op == "placeholder" and (tensor := leaf(n)) is not None]
    batched = _dependents([n for n, tensor in leaves if tensor.batched])
    return batched & _dependents([n for n, tensor in leaves if tensor.kind == "parameter"])


def _dependents(nodes: list[fx.Node]) -> frozenset[fx.Node]:
    """Return the calls that depend on one of ``nodes``."""
    dependents, todo = set[fx.Node](), list(nodes)
    while todo:
        new = set(todo.pop().users) - dependents
        dependents |= new
        todo += new
    return frozenset(n for n in dependents if n.op == "call_function")
