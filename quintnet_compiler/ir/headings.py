"""Headings by module path, in programs and generated code as they are printed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import fx

from ..core.annotations import facts, known
from ..core.errors import Where
from ..core.names import one_line

TOP = "(top level)"  # the module itself, or the loss: neither has a path
_ASSIGNS = re.compile(r"(\s+)(\w+) = ")


def heading(before: Where | None, now: Where) -> str:
    """The comment above a node: its module path and source line; the source line alone, indented, where only that
    changes; nothing where nothing does."""
    if now == before:
        return ""
    if before is not None and before.module == now.module:
        return one_line(f"#   {now.source}")
    return one_line(f"# {now.module or TOP}  {now.source}".rstrip())


def with_headings(code: str, graph: fx.Graph) -> str:
    """``code``, which was generated from ``graph``, with a comment where the module path changes. Lines of nodes that
    belong to no place stay with those above."""
    return "".join(f"{line}\n" for line in _lines(code, _modules(graph)))


def _modules(graph: fx.Graph) -> Mapping[str, str]:
    """Of the nodes that have a place, by name: the module path."""
    places = {node.name: facts(node).where for node in graph.nodes if known(node) and node.op != "placeholder"}
    return {name: place.module or TOP for name, place in places.items() if str(place)}


def _lines(code: str, modules: Mapping[str, str]) -> Iterator[str]:
    last = ""
    for line in code.splitlines():
        found = _ASSIGNS.match(line)
        module = modules.get(found[2], last) if found else last
        if found and module != last:
            yield f"{found[1]}# {one_line(module)}"
        last = module
        yield line
