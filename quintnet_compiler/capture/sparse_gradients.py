"""Operators that make sparse gradients when they are asked to."""

from __future__ import annotations

from torch import fx

from ..compat.torch import OpOverload, schema
from ..core.errors import CompileError
from .places import WHERE

_ASK = ("sparse", "sparse_grad")


def check_dense(graph: fx.Graph) -> None:
    """Raises: CompileError QN105 for an operator of a captured graph that is to make a sparse gradient."""
    for node in graph.nodes:
        if not isinstance(node.target, OpOverload):
            continue
        names = [argument.name for argument in schema(node.target).arguments]
        given = dict(zip(names, node.args, strict=False)) | node.kwargs
        asked = next((name for name in _ASK if given.get(name) is True), None)
        if asked is not None:
            raise CompileError(
                "QN105",
                f"{node.target} with {asked}=True asks for a sparse gradient, and programs make dense ones",
                where=node.meta[WHERE],
                fix=f"{asked}=False",
            )
