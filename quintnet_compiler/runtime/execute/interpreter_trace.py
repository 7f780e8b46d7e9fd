"""Run a generated function node by node and show every value to an observer: slow, for debugging."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import fx

from ...compat.torch_codegen import SHIPPED
from ...ir.distributed_program import StageProgram
from ...ir.generated import GeneratedModule
from ...ops.catalog import op_spec

Observer = Callable[[fx.Node, Any], None]
PHASES = ("once", "forward", "backward", "weight")


class Watch(Protocol):
    """Observes the values of a step."""

    def observer(self, stage: StageProgram, phase: str, microbatch: int) -> Observer:
        """Return what observes the values of one run of a stage's function."""
        ...


def run_watched(module: GeneratedModule, args: Sequence[Any], observe: Observer) -> tuple[Any, ...]:
    """Return ``module(args)``, and call ``observe(node, value)`` with each value as soon as it is computed.

    A product that is added straight to a gradient is shown at the node that adds it.
    """
    values: dict[fx.Node, Any] = {}
    inputs = iter(args)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(inputs)
            observe(node, values[node])
            continue
        node_args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "output":
            return tuple(node_args[0])
        if node.op == "call_method":
            receiver, *arguments = node_args
            values[node] = getattr(receiver, node.target)(*arguments, **kwargs)
            if op_spec(node).accumulates == "product":
                observe(node, SHIPPED.mm(arguments[0], arguments[1]))
                continue
        else:
            values[node] = node.target(*node_args, **kwargs)
        if values[node] is not None:
            observe(node, values[node])
    raise AssertionError("a generated function returns")
