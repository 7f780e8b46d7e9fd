"""Generated functions, line by line, each beside the line of the user's model that it comes from."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from torch import fx

from ..core.annotations import facts, has_facts, values
from ..ir.distributed_program import DistributedProgram, Piece, StageProgram
from ..ir.repeated_blocks import Block, block_of
from ..ops.catalog import collective_of
from .fold import FoldedUnit, fold

_ASSIGNED = re.compile(r"\s*(\w+)(?:\s*:[^=]*)?\s=\s")


@dataclass(frozen=True)
class CodeLine:
    """``code`` of a node, what it ``frees`` afterwards, the user's ``source`` line ("" as the line above), and whether
    the node communicates."""

    code: str
    frees: str
    source: str
    communicates: bool
    label: Hashable


@dataclass(frozen=True)
class Function:
    """A generated function: how many values it takes for a step and for each microbatch, and what it returns."""

    name: str
    static: int
    dynamic: int
    outputs: int
    units: tuple[FoldedUnit[CodeLine], ...]


@dataclass(frozen=True)
class StageCode:
    """The functions of a stage; or which earlier stage ``like`` has the same but for names."""

    index: int
    ranks: str
    functions: tuple[Function, ...]
    like: int | None = None


def stages_code(program: DistributedProgram) -> list[StageCode]:
    """Return the code of all stages, each kind once."""
    seen: dict[Hashable, int] = {}
    stages = []
    for stage in program.stages:
        functions = tuple(_function(name, piece) for name, piece in stage.pieces.items())
        key = tuple(map(_kind, functions))
        like = seen.setdefault(key, stage.index)
        same = like != stage.index
        stages.append(StageCode(stage.index, _ranks(program, stage), () if same else functions, like if same else None))
    return stages


def _kind(function: Function) -> Hashable:
    """Equal for functions that differ in names alone."""
    units = tuple((tuple(line.label for line in unit.items), len(unit.same)) for unit in function.units)
    return function.name, function.static, function.dynamic, units


def _ranks(program: DistributedProgram, stage: StageProgram) -> str:
    place = program.schedule.placement[stage.index]
    ranks = [r for r in range(program.mesh.size) if program.mesh.coordinate(r).get("pp", 0) == place]
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    rest = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"ranks {', '.join(map(str, ranks[:8]))}{rest}"


def _function(name: str, piece: Piece) -> Function:
    nodes = {node.name: node for node in piece.module.graph.nodes}
    home = _homes(piece.module.graph)
    lines: list[tuple[CodeLine, Block | None]] = []
    last = ""
    for text in piece.code.splitlines():
        match = _ASSIGNED.match(text)
        node = nodes.get(match[1]) if match else None
        if node is None or node.op == "placeholder":
            continue
        source = str(facts(node).where) if has_facts(node) else last
        code, _, frees = text.strip().partition(";  ")
        calls = node.op == "call_method" and collective_of(str(node.target)) is not None
        shown = source if source != last else ""
        lines.append((CodeLine(code, frees, shown, calls, _label(node)), home[node]))
        last = source
    folded = fold(lines, lambda pair: pair[1], lambda pair: pair[0].label)
    units = tuple(FoldedUnit(u.title, tuple(line for line, _ in u.items), u.same) for u in folded)
    return Function(name, len(piece.static), len(piece.dynamic), len(piece.outputs), units)


def _homes(graph: fx.Graph) -> Mapping[fx.Node, Block | None]:
    """Return the block of each node; a node of which none is known is in the block of the previous one."""
    homes: dict[fx.Node, Block | None] = {}
    last: Block | None = None
    for node in graph.nodes:
        last = homes[node] = block_of(node) if has_facts(node) else last
    return homes


def _label(node: fx.Node) -> Hashable:
    """Equal for nodes that differ in names and numbers of places alone."""
    args = node.args[:-1] if node.op == "call_method" and not str(node.target).startswith("accumulate") else node.args
    plain = fx.map_arg((args, node.kwargs), lambda n: "%")
    shapes = tuple((tuple(v.shape), v.dtype) for v in values(node) if v is not None) if has_facts(node) else ()
    return node.op, str(node.target), re.sub(r"\d+_|_\d+", "#", repr(plain)), shapes
