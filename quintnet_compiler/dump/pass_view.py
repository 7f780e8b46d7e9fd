"""The program after each pass, folded, and what the pass changed."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from ..core.annotations import is_getitem, leaf, values
from ..core.names import one_line
from ..ir.printer import Listing, listing
from ..ir.repeated_blocks import Block, block_of
from .fold import fold

MOST = 400  # lines that are shown of a text, or of a difference
LARGEST = 20_000  # lines whose differences are looked for


@dataclass(frozen=True)
class PassView:
    """After pass ``number``: folded ``lines`` (``hidden``: how many are left out), and beside the pass before:
    ``counts`` of operators that changed, and the lines that did (each begins with +, - or a space for "...")."""

    number: int
    name: str
    lines: tuple[str, ...]
    hidden: int
    counts: tuple[tuple[str, int], ...]
    changed: tuple[str, ...]
    unchanged: bool


def passes_view(passes: Sequence[tuple[str, Any]]) -> list[PassView]:
    """Return a view of each pass, in order."""
    views: list[PassView] = []
    previous: list[str] = []
    counted: Counter[str] = Counter()
    for number, (name, program) in enumerate(passes, 1):
        text = listing(program)
        lines, count = _folded(text), _count(text)
        counts = {kind: count[kind] - counted[kind] for kind in sorted({*count, *counted})} if text.graph else {}
        changed = _changed(previous, lines) if number > 1 and text.graph else []
        cut = (f" ... {len(changed) - MOST} more",) if len(changed) > MOST else ()
        views.append(
            PassView(
                number, name, tuple(lines[:MOST]), max(0, len(lines) - MOST),
                tuple((kind, n) for kind, n in counts.items() if n) if number > 1 else (),
                (*changed[:MOST], *cut), number > 1 and lines == previous,
            )
        )  # fmt: skip
        previous, counted = lines, count
    return views


def _count(text: Listing) -> Counter[str]:
    nodes = text.graph.nodes if text.graph else ()
    return Counter(str(n.target).removesuffix(".default") for n in nodes if n.op == "call_function")


def _folded(text: Listing) -> list[str]:
    lines = text.head.splitlines()
    if text.graph is None:
        return lines
    nodes = list(text.graph.nodes)
    home: dict[fx.Node, Block | None] = {node: block_of(node) if node.op != "output" else None for node in nodes}
    for unit in fold(nodes, home.__getitem__, lambda node: _label(node, text)):
        if unit.title:
            lines.append(f"# {unit.title}")
        lines += [text.line(node) for node in unit.items]
        if unit.same:
            lines.append(f"# ... and the same for {unit.rest}")
    return [one_line(line) for line in lines]


def _label(node: fx.Node, text: Listing) -> Hashable:
    if node.op == "output":
        return node.op
    state = leaf(node)
    literals = tuple(repr(a) for a in node.args if not isinstance(a, fx.Node | list | tuple))
    shapes = tuple((tuple(v.shape), v.dtype) for v in values(node) if v is not None)
    target = "" if state else str(node.target)
    note = text.notes.get(node, "").partition(" until %")[0]
    name = state.name.rpartition(".")[2] if state else ""
    return node.op, target, is_getitem(node), literals, shapes, note, name


def _changed(old: list[str], new: list[str]) -> list[str]:
    if len(old) + len(new) > LARGEST:
        return [" ... too long to compare; see the files of both passes"]
    lines: list[str] = []
    for line in list(difflib.unified_diff(old, new, lineterm="", n=0))[2:]:
        lines.append(" ..." if line.startswith("@@") else line)
    return lines[1:]
