"""Check of what the text of generated functions writes in another way than torch.fx would: slices, as indices."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from torch import fx

from ..ops.catalog import op_spec
from .failure import check_failure

_OPEN_END = 2**63 - 1  # torch's end of a slice that has none
_INDEX = re.compile(r"[\w)\]]\s*\[")  # a bracket after a value; that of a list follows "(", "," or "="


def check_source_slices(code: str, graph: fx.Graph) -> None:
    """Check that each line ``y = x[:, 2:5]`` is the slice that ``graph`` has under that name.

    Raises:
        CompileError: QN209 with the line that differs.
    """
    nodes = {node.name: node for node in graph.nodes}
    for name, source, index in _indexed_assignments(code):
        node = nodes.get(name)
        if node is None or not op_spec(node).slices or node.kwargs:
            matches = False
        else:
            matches = _slice_arguments(source, index) == _with_defaults([str(node.args[0]), *node.args[1:]])
        if not matches:
            raise check_failure("code check", f"{name} is not the slice that the graph has")


def _indexed_assignments(code: str) -> Iterator[tuple[str, str, ast.expr]]:
    """Yield the target, the value and the index of each assignment of an indexed value.

    Only lines with an index are parsed. A statement of several lines (a long tuple of names) has none.
    """
    lines = (line.strip() for line in code.splitlines() if _INDEX.search(line))
    for node in ast.walk(ast.parse("\n".join(lines))):
        if not isinstance(node, ast.Assign):
            continue
        indexed = node.value
        if isinstance(indexed, ast.Subscript) and not isinstance(indexed.slice, ast.Constant):  # x[1] is a getitem
            yield ast.unparse(node.targets[0]), ast.unparse(indexed.value), indexed.slice


def _slice_arguments(source: str, index: ast.expr) -> list[object]:
    """Return the arguments of ``aten.slice``: the value, dim, start, end and step. Empty for any other index."""
    *outer, last = index.elts if isinstance(index, ast.Tuple) else [index]
    if any(ast.unparse(cut) != ":" for cut in outer) or not isinstance(last, ast.Slice):
        return []
    start, end, step = (None if n is None else ast.literal_eval(n) for n in (last.lower, last.upper, last.step))
    return [source, len(outer), start or 0, _OPEN_END if end is None else end, 1 if step is None else step]


def _with_defaults(args: list[object]) -> list[object]:
    """Return the arguments of ``aten.slice`` with defaults filled in."""
    defaults: list[object] = [None, 0, None, None, 1]
    source, dim, start, end, step = args + defaults[len(args) :]
    return [source, dim, start or 0, _OPEN_END if end is None else end, step]
