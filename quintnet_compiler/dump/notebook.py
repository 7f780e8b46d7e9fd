"""What a notebook shows of a program: its plan, parameters, operators, a step, and memory, in a part of a page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from markupsafe import Markup
from torch import nn
from torch.nn.parameter import is_lazy

from ..core import html
from ..core.annotations import format_bytes
from ..core.mesh import Mesh
from ..core.name_patterns import by_pattern
from ..core.sharding import local_shape
from ..ir.distributed_program import DistributedProgram
from ..ir.plan import Plan
from ..simulation.chart import figure_svg
from ..simulation.timeline import Timeline, duration
from .fold import FoldedUnit
from .model_graph import Operator, operators, units
from .page import Extras, axes_of, cards, counted, decisions_of_plan, memory_rows, unit_rows

MOST_OPERATORS, MOST_ROWS = 400, 100  # of a figure: more are cut off, and counted
_BETWEEN = "\x1f"  # cells of a row, while names are brought together


def program_figure(program: DistributedProgram, plan: Plan, predicted: Timeline | None, unpriced: str) -> str:
    """A program that is compiled. ``predicted``: a simulated step, or in ``unpriced`` why there is none. Where the
    graphs are not at hand, operators are left out: nothing is compiled to show it."""
    shown, hidden = _first(units(program, operators(program))) if program.has_source else ([], 0)
    state = state_rows(program)
    ranks = memory_rows(predicted)
    picture = Markup(figure_svg(predicted)) if predicted is not None else ""  # its template has escaped it
    return html.figure(
        "quintnet_compiler.dump", "notebook.html.jinja", size=format_bytes, duration=duration, counted=counted,
        title=f"A program for {program.mesh!r}", cards_shown=cards(program, Extras(predicted)),
        decisions=decisions_of_plan(plan), axes=axes_of(program), state=state[:MOST_ROWS],
        hidden_state=len(state) - MOST_ROWS, units=unit_rows(program, shown), hidden=hidden, picture=picture,
        notes=predicted.notes if predicted is not None else (), unpriced=unpriced, memory=ranks[:MOST_ROWS],
        hidden_ranks=len(ranks) - MOST_ROWS, has_source=program.has_source,
    )  # fmt: skip


def waiting_figure(model: nn.Module, mesh: Mesh, plan: Plan) -> str:
    """Return a figure of a program without a batch: its plan, and the module as it is. Nothing is traced."""
    parts = [(name, type(part).__name__, _counted(part)) for name, part in model.named_children()]
    direct = list(model.parameters(recurse=False))
    rows = [("", type(model).__name__, _numbers(direct)), *parts] if direct or not parts else parts
    shown = [("ranks", str(mesh.size)), ("parameters", _counted(model)), ("module", type(model).__name__)]
    return html.figure(
        "quintnet_compiler.dump", "waiting.html.jinja", title=f"A program for {mesh!r}", cards_shown=shown,
        decisions=decisions_of_plan(plan), rows=rows[:MOST_ROWS], hidden=len(rows) - MOST_ROWS,
    )  # fmt: skip


def _counted(module: nn.Module) -> str:
    return _numbers(list(module.parameters()))


def _numbers(parameters: Sequence[nn.Parameter]) -> str:
    if any(is_lazy(p) for p in parameters):
        return "known after the first batch"
    return f"{sum(p.numel() for p in parameters):,}"


def state_rows(program: DistributedProgram) -> list[dict[str, Any]]:
    """Return parameters, buffers and constants; those whose names differ in a number alone are one row."""
    axes = [(at, axis.name) for at, axis in enumerate(program.axes) if axis.role != "time"]
    ranks = [axis.size for axis in program.axes]

    def lines() -> Iterator[tuple[str, str]]:
        for spec in program.state.values():
            part = local_shape(spec.shape, spec.sharding, ranks)
            held = format_bytes(spec.dtype.itemsize * math.prod(part))
            types = " ".join(f"{axis}={spec.sharding[at]}" for at, axis in axes)
            cells = spec.name, spec.kind, str(spec.dtype)[6:], str(list(spec.shape)), str(list(part)), held, types
            yield spec.name, _BETWEEN.join(cells)

    rows = []
    for line in by_pattern(lines()):
        name, kind, dtype, shape, part, held, types = line.split(_BETWEEN)
        chips = [text.partition("=")[::2] for text in types.split()]
        rows.append({"name": name, "kind": kind, "dtype": dtype, "shape": shape, "here": part, "held": held,
                     "types": chips})  # fmt: skip
    return rows


def _first(units: list[FoldedUnit[Operator]]) -> tuple[list[FoldedUnit[Operator]], int]:
    """Return as many operators as a figure has room for, and how many more there are."""
    shown: list[FoldedUnit[Operator]] = []
    room = MOST_OPERATORS
    for unit in units:
        if room > 0:
            shown.append(replace(unit, items=unit.items[:room]))
        room -= len(unit.items)
    return shown, max(0, -room)
