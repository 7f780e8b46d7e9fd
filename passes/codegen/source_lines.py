"""How lines of generated functions are written, where torch.fx's own way is hard to read: slices, and long tuples."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

WIDTH = 112  # of a tuple's line, which stands indented
_SLICE = re.compile(r"(\w+ = )torch\.ops\.aten\.slice\.Tensor\((\w+), (\d+), (\d+), (\d+)(?:, (\d+))?\)")
_END = 2**63 - 1  # as torch writes "to the end"


def body_lines(body: list[str]) -> list[str]:
    """Return a function's body with slices as indices, in the parts in which torch.fx writes it.

    ``x[:, 0:5]`` reaches the same kernel as ``torch.ops.aten.slice.Tensor(x, 1, 0, 5)``, by a shorter way.

    >>> body_lines(["a = torch.ops.aten.slice.Tensor(x, 1, 0, 5)", ";  x = None\\n"])
    ['a = x[:, 0:5]', ';  x = None\\n']
    """
    return [_returned(part) if part.startswith("return (") else _SLICE.sub(_index, part) for part in body]


def _index(match: re.Match[str]) -> str:
    assigned, x, dim, start, end, step = match.groups()
    cut = f"{start}:{'' if int(end) == _END else end}" + (f":{step}" if step not in (None, "1") else "")
    return f"{assigned}{x}[{', '.join([*[':'] * int(dim), cut])}]"


def _returned(part: str) -> str:
    names = part.removeprefix("return (").removesuffix(")").removesuffix(",").split(", ")
    return f"return {in_lines(names)}" if len(part) > WIDTH else part


def in_lines(names: Sequence[str]) -> str:
    """A tuple of names, over as many lines as it needs."""
    lines = textwrap.wrap(", ".join(names) + ",", WIDTH, break_long_words=False, break_on_hyphens=False)
    return "(" + "\n    ".join(["", *lines]) + "\n)"
