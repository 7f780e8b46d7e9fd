"""Refuse operators with sparse gradients."""

from __future__ import annotations

from torch import fx

from ..compat.torch import OpOverload, schema
from ..core.errors import CompileError
from .places import WHERE

_ASK = ("sparse", "sparse_grad")


def check_dense(graph: fx.Graph) -> None:
    """Raise CompileError QN105 for an operator of a captured graph that asks for a sparse gradient."""
    for node in graph.nodes:
        if not isinstance(node.target, OpOverload):
            continue
        names = [argument.name for argument in schema(node.target).arguments]
        arguments = dict(zip(names, node.args, strict=False)) | node.kwargs
        option = next((name for name in _ASK if arguments.get(name) is True), None)
        if option is not None:
            raise CompileError(
                "QN105",
                f"{node.target} with {option}=True asks for a sparse gradient, and programs make dense ones",
                where=node.meta[WHERE],
                fix=f"{option}=False",
            )
