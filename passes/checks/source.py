"""Check of what the text of generated functions writes in another way than torch.fx would: slices, as indices."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import torch
from torch import fx

from ...core.errors import REPORT, CompileError

_END = 2**63 - 1  # an end that is left out
_INDEX = re.compile(r"[\w)\]]\s*\[")  # a bracket behind a value; that of a list stands behind "(", "," or "="


def check_source_slices(code: str, graph: fx.Graph) -> None:
    """Every ``y = x[:, 2:5]`` is the slice that ``graph`` has under that name.

    Raises:
        CompileError: QN209 with the line that is another.
    """
    nodes = {node.name: node for node in graph.nodes}
    for name, source, index in _indexed(code):
        node = nodes.get(name)
        called = node is not None and node.target is torch.ops.aten.slice.Tensor and not node.kwargs
        if node is None or not called or _as_call(source, index) != _whole([str(node.args[0]), *node.args[1:]]):
            raise CompileError("QN209", f"code check: {name} is not the slice that the graph has", fix=REPORT)


def _indexed(code: str) -> Iterator[tuple[str, str, ast.expr]]:
    """Of the lines that have an index: the many others are not parsed. What takes several lines (a long tuple of
    names) has none."""
    lines = (line.strip() for line in code.splitlines() if _INDEX.search(line))
    for node in ast.walk(ast.parse("\n".join(lines))):
        if not isinstance(node, ast.Assign):
            continue
        picked = node.value
        if isinstance(picked, ast.Subscript) and not isinstance(picked.slice, ast.Constant):  # x[1]: one of several
            yield ast.unparse(node.targets[0]), ast.unparse(picked.value), picked.slice


def _as_call(source: str, index: ast.expr) -> list[object]:
    """What torch's operator would take: the value, dim, start, end and step."""
    *whole, last = index.elts if isinstance(index, ast.Tuple) else [index]
    plain = all(ast.unparse(cut) == ":" for cut in whole)
    if not plain or not isinstance(last, ast.Slice):
        return []
    start, end, step = (None if n is None else ast.literal_eval(n) for n in (last.lower, last.upper, last.step))
    return [source, len(whole), start or 0, _END if end is None else end, 1 if step is None else step]


def _whole(args: list[object]) -> list[object]:
    """The arguments with defaults."""
    defaults: list[object] = [None, 0, None, None, 1]
    source, dim, start, end, step = args + defaults[len(args) :]
    return [source, dim, start or 0, _END if end is None else end, step]
