"""Runs a generated function node by node and shows every value to an observer: slow, to find out what went wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import fx

from ...ir.distributed_program import StageProgram
from ...ir.generated import GeneratedModule

Observer = Callable[[fx.Node, Any], None]
PHASES = ("once", "forward", "backward", "weight")


class Watch(Protocol):
    """Whoever looks at a step from inside."""

    def observer(self, stage: StageProgram, phase: str, microbatch: int) -> Observer:
        """What to show the values of one run of a stage's function to."""
        ...


def run_watched(module: GeneratedModule, args: Sequence[Any], observe: Observer) -> tuple[Any, ...]:
    """What ``module(args)`` returns. ``observe(node, value)`` sees each value when it exists.

    A product that goes straight into a gradient has no node of its own; it is shown at the node that adds it.
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
            receiver, *rest = node_args
            values[node] = getattr(receiver, node.target)(*rest, **kwargs)
            if node.target == "accumulate_matmul":
                observe(node, torch.mm(rest[0], rest[1]))
                continue
        else:
            values[node] = node.target(*node_args, **kwargs)
        if values[node] is not None:
            observe(node, values[node])
    raise AssertionError("a generated function returns")
