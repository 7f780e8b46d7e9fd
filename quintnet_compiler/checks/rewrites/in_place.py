"""Check of sums in place: what they overwrite is read by nothing else, under whatever name."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from ...compat.torch import composite_in_cpp, schema_or_none
from ...core.annotations import facts, is_getitem
from ...core.errors import REPORT, CompileError
from ...ir.program import DifferentiatedProgram
from ...ops.catalog import op_spec
from ...ops.collectives import STARTS, all_reduce_
from ...ops.rank_local import LOOKUPS, embedding_rows_backward

_WRITES = frozenset({all_reduce_, STARTS[all_reduce_]})
_COMPUTES = frozenset({torch.ops.aten.linear.default, *LOOKUPS, embedding_rows_backward})


def check_in_place(program: DifferentiatedProgram) -> None:
    """Raise CompileError QN209 with a sum that would overwrite a leaf, or what something else reads."""
    for node in program.graph.nodes:
        if node.target not in _WRITES:
            continue
        for other in _one_memory(node.all_input_nodes[0]):
            readers = [user for user in other.users if user is not node and not _may_be_view(user)]
            if other.op != "call_function" or readers:
                what = readers[0].name if readers else "all other steps"
                raise CompileError(
                    "QN209",
                    f"in-place check: {node.name} overwrites {other.name}, which {what} may read",
                    where=facts(node).where,
                    fix=REPORT,
                )
            if program.stage.get(other) != program.stage.get(node) or facts(other).phase != facts(node).phase:
                raise CompileError(
                    "QN209",
                    f"in-place check: {node.name} overwrites {other.name} of another function",
                    where=facts(node).where,
                    fix=REPORT,
                )


def _one_memory(node: fx.Node) -> Iterator[fx.Node]:
    """All nodes that may lie in the memory of ``node``: what it may be a view of, and views of any of them."""
    seen, todo = {node}, [node]
    while todo:
        here = todo.pop()
        yield here
        near = [user for user in here.users if _may_be_view(user)]
        near += here.all_input_nodes if _may_be_view(here) else []
        todo += (new := [n for n in dict.fromkeys(near) if n not in seen])
        seen.update(new)


def _may_be_view(node: fx.Node) -> bool:
    """Return whether a result may lie in an input's memory: its schema says so, or cannot say (composites, slices)."""
    if node.op != "call_function" or node.target in _COMPUTES or node.target in _WRITES:
        return False
    returns = getattr(schema_or_none(node.target), "returns", ())
    if is_getitem(node) or op_spec(node).on_rank or composite_in_cpp(node.target):
        return True
    return not returns or any(result.alias_info is not None for result in returns)
