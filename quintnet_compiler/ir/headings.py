"""Headings by module path, for printed programs and generated code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import fx

from ..core.annotations import facts, has_facts
from ..core.errors import Where
from ..core.names import one_line

TOP = "(top level)"  # stands for the module itself and the loss, which have no path
_ASSIGNS = re.compile(r"(\s+)(\w+) = ")


def heading(previous: Where | None, current: Where) -> str:
    """Return the comment above a node: its module path and source line.

    It is the source line alone, indented, where only that changes, and empty where nothing changes.
    """
    if current == previous:
        return ""
    if previous is not None and previous.module == current.module:
        return one_line(f"#   {current.source}")
    return one_line(f"# {current.module or TOP}  {current.source}".rstrip())


def with_headings(code: str, graph: fx.Graph) -> str:
    """Return the code of ``graph`` with a comment where the module path changes.

    Lines of nodes without a place stay with those above.
    """
    return "".join(f"{line}\n" for line in _lines(code, _modules(graph)))


def _modules(graph: fx.Graph) -> Mapping[str, str]:
    """Return the module path of each node that has a place, by name."""
    places = {node.name: facts(node).where for node in graph.nodes if has_facts(node) and node.op != "placeholder"}
    return {name: place.module or TOP for name, place in places.items() if str(place)}


def _lines(code: str, modules: Mapping[str, str]) -> Iterator[str]:
    previous = ""
    for line in code.splitlines():
        match = _ASSIGNS.match(line)
        module = modules.get(match[2], previous) if match else previous
        if match and module != previous:
            yield f"{match[1]}# {one_line(module)}"
        previous = module
        yield line
