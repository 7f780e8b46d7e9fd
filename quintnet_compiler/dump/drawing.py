"""The graph of a model's blocks as DOT and as a picture."""

from __future__ import annotations

import json
from dataclasses import dataclass

from markupsafe import Markup

from ..core.annotations import format_bytes
from ..core.html import environment
from .fold import FoldedUnit
from .model_graph import Move, Operator

WIDTH, LEFT, BOX, HEIGHT, GAP = 760, 84, 330, 46, 40
MOST = 120  # boxes of a picture


@dataclass(frozen=True)
class Box:
    """A block: its operators' names are ``inside``."""

    title: str
    count: int
    times: int
    stage: int | None
    moves: tuple[Move, ...]
    inside: frozenset[str]
    reads: frozenset[str]

    @property
    def name(self) -> str:
        return self.title + (f" ×{self.times}" if self.times > 1 else "")

    @property
    def details(self) -> str:
        return f"{self.count} operator{'s' if self.count > 1 else ''}" + (" each" if self.times > 1 else "")

    @property
    def traffic(self) -> list[str]:
        """Return ``2 all_gather over tp, 4.00 KiB`` for each kind, of one microbatch's forward."""
        sizes: dict[tuple[str, str], list[int]] = {}
        for move in self.moves:
            if move.forward:
                sizes.setdefault((move.forward, move.axis), []).append(move.bytes)
        return [f"{len(b)} {name} over {axis}, {format_bytes(sum(b))}" for (name, axis), b in sizes.items()]


def boxes(units: list[FoldedUnit[Operator]]) -> list[Box]:
    """Return a box for each unit."""
    drawn = []
    for unit in units:
        moves = tuple(move for operator in unit.items for move in operator.moves)
        stage = next((operator.stage for operator in unit.items if operator.stage is not None), None)
        inside = frozenset(operator.name for operator in unit.items)
        reads = frozenset(name for operator in unit.items for name in operator.reads) - inside
        drawn.append(Box(title_of(unit), len(unit.items), 1 + len(unit.same), stage, moves, inside, reads))
    return drawn


def title_of(unit: FoldedUnit[Operator]) -> str:
    """Return the block's path, or the modules between blocks."""
    if unit.title:
        return unit.title
    modules = list(dict.fromkeys(item.module or item.operator.rpartition(".")[2] for item in unit.items))
    return ", ".join(modules[:3]) + (", ..." if len(modules) > 3 else "")


def edges(drawn: list[Box], units: list[FoldedUnit[Operator]]) -> list[tuple[int, int]]:
    """Return which box reads which; blocks that were folded away count as the box that stands for them."""
    home = {name: index for index, box in enumerate(drawn) for name in box.inside}
    pairs = {(home[name], index) for index, box in enumerate(drawn) for name in box.reads if name in home}
    # what the blocks that are left out hand on comes from the box that stands for them
    pairs |= {(i, i + 1) for i, unit in enumerate(units[:-1]) if unit.same}
    return sorted((a, b) for a, b in pairs if a < b)


def dot(drawn: list[Box], pairs: list[tuple[int, int]]) -> str:
    """Return the graph in Graphviz' language; texts are quoted as JSON does."""
    lines = ["digraph model {", "  rankdir=TB;", '  node [shape=box, style=rounded, fontname="sans-serif"];']
    stages = list(dict.fromkeys(box.stage for box in drawn))
    for stage in stages:
        inside = [f"    b{i} [label={_quoted(box)}];" for i, box in enumerate(drawn) if box.stage == stage]
        head = [] if stage is None else [f"  subgraph cluster_{stage} {{", f'    label="stage {stage}";']
        lines += [*head, *inside, *([] if stage is None else ["  }"])]
    return "\n".join([*lines, *(f"  b{a} -> b{b};" for a, b in pairs), "}"]) + "\n"


def _quoted(box: Box) -> str:
    return json.dumps("\n".join([box.name, box.details, *box.traffic]), ensure_ascii=False)


def draw_boxes(drawn: list[Box], pairs: list[tuple[int, int]]) -> Markup:
    """Return a picture: a box per block from top to bottom; arcs along the right side for reads across others."""
    shown = drawn[:MOST]
    places, y, stage = [], 16.0, None
    bands: list[dict[str, object]] = []
    for box in shown:
        if box.stage is not None and box.stage != stage:
            stage = box.stage
            bands.append({"stage": stage, "top": y, "odd": bool(stage % 2)})
        high = HEIGHT + 15 * max(0, len(box.traffic) - 1)
        places.append({"y": y, "high": high, "box": box})
        if bands:
            bands[-1]["bottom"] = y + high
        y += high + GAP
    arcs = []
    for a, b in pairs:
        if b < len(shown):
            start, end = places[a], places[b]
            top, bottom = float(start["y"]) + float(start["high"]), float(end["y"])  # type: ignore[arg-type]
            arcs.append({"top": top, "bottom": bottom, "reach": 0 if b == a + 1 else min(150, 24 + 12 * (b - a))})
    picture = environment("quintnet_compiler.dump").get_template("graph.svg.jinja")
    rest = len(drawn) - len(shown)
    return Markup(
        picture.render(width=WIDTH, height=round(y), left=LEFT, span=BOX, bands=bands, places=places, arcs=arcs,
                       rest=rest)
    )  # fmt: skip
