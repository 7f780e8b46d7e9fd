"""The dump's page: one file that needs nothing else."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from markupsafe import Markup

from ..core import html
from ..core.annotations import format_bytes
from ..ir.distributed_program import DistributedProgram
from ..ir.plan import Plan
from ..simulation.chart import timeline_svg
from ..simulation.timeline import Timeline, duration
from .code_view import stages_code
from .communication import schedule_document, transfer_bytes
from .drawing import title_of
from .fold import FoldedUnit
from .model_graph import Operator
from .pass_view import passes_view


@dataclass(frozen=True)
class Extras:
    """Further parts of a dump.

    Attributes:
        predicted: a simulated step; ``unpriced``: why there is none.
        measured: a measured step.
        plans: the planner's, best first, as (layout, numbers, plan).
        plans_picture: an SVG of all plans that it priced.
    """

    predicted: Timeline | None = None
    unpriced: str = ""
    measured: Timeline | None = None
    plans: tuple[tuple[str, Mapping[str, Any], Plan], ...] = field(default=())
    plans_picture: str = ""


def program_page(
    program: DistributedProgram, plan: Plan, passes: Sequence[tuple[str, Any]], units: list[FoldedUnit[Operator]],
    picture: Markup, extras: Extras, hashes: Mapping[str, str],
) -> str:  # fmt: skip
    """HTML with its style, script and pictures inside. ``hashes``: the folder's other files."""
    script = files(__package__).joinpath("templates", "page.js").read_text(encoding="utf-8")
    return html.page(
        "quintnet_compiler.dump", "index.html.jinja", title=f"{program.mesh}", script=script,
        size=format_bytes, duration=duration, counted=counted, cards_shown=cards(program, extras),
        decisions=decisions_of_plan(plan), axes=axes_of(program), picture=picture, units=unit_rows(program, units),
        traffic=_traffic(program), stages=stages_code(program), passes=passes_view(passes), pictures=_pictures(extras),
        memory=memory_rows(extras.predicted), plans=extras.plans, plans_picture=Markup(extras.plans_picture),
        unpriced=extras.unpriced, hashes=hashes,
    )  # fmt: skip


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def decisions_of_plan(plan: Plan) -> list[tuple[str, Any]]:
    """Return the decisions of a plan, by name."""
    return list({"schedule": plan.schedule, **plan.decisions}.items())


def axes_of(program: DistributedProgram) -> list[tuple[str, int, str]]:
    """Name, size and role of each axis over ranks."""
    return [(axis.name, axis.size, axis.role) for axis in program.space]


def cards(program: DistributedProgram, extras: Extras) -> list[tuple[str, str]]:
    """Return the numbers on top of a page: (name, value)."""
    mesh = program.mesh
    microbatches = next((axis.size for axis in program.axes if axis.role == "time"), 1)
    state = sum(math.prod(s.shape) for s in program.state.values() if s.kind == "parameter")
    shown = [("ranks", str(mesh.size)), ("parameters", f"{state:,}"), ("microbatches", str(microbatches))]
    shown += [("pipeline stages", str(len(program.stages)))] if len(program.stages) > 1 else []
    if extras.predicted:
        step = extras.predicted
        shown += [("a step, predicted", duration(step.seconds)), ("bubble", f"{step.bubble:.1%}")]
        shown += [("peak of a rank", format_bytes(step.peak.bytes))]
    if extras.measured:
        shown += [("a step, measured", duration(extras.measured.seconds))]
    return shown


def unit_rows(program: DistributedProgram, units: list[FoldedUnit[Operator]]) -> list[dict[str, Any]]:
    """Return blocks of the model in order, with what each stage receives."""
    rows: list[dict[str, Any]] = []
    previous: int | None = None
    for unit in units:
        stage = next((item.stage for item in unit.items if item.stage is not None), previous)
        cut: list[tuple[int, int, int, int]] = []
        if stage != previous and previous is not None:
            cut = [(t.source, t.target, *transfer_bytes(program, t)) for t in program.transfers if t.target == stage]
        moves = [move for item in unit.items for move in item.moves]
        rows.append(
            {
                "title": title_of(unit), "unit": unit, "stage": stage, "cut": cut, "starts": stage != previous,
                "first": stage not in {row["stage"] for row in rows},
                "moves": len(moves), "bytes": sum(m.bytes for m in moves),
            }
        )  # fmt: skip
        previous = stage
    return rows


def _traffic(program: DistributedProgram) -> dict[str, Any]:
    """Return collectives by stage, function, operator and axis; transfers; sums of gradients."""
    document = schedule_document(program)
    rows = []
    for function in document["functions"]:
        groups: dict[tuple[str, str, int], list[int]] = defaultdict(list)
        for exchange in function["exchanges"]:
            key = exchange["operator"].removeprefix("start_"), exchange["axis"], exchange["ranks"]
            groups[key].append(exchange["bytes"])
        rows += [
            {"stage": function["stage"], "function": function["function"], "operator": name, "axis": axis,
             "ranks": ranks, "count": len(sizes), "bytes": sum(sizes)}
            for (name, axis, ranks), sizes in groups.items()
        ]  # fmt: skip
    return {"collectives": rows, "transfers": document["transfers"], "gradients": document["gradients"]}


def _pictures(extras: Extras) -> list[tuple[str, Timeline, Markup]]:
    """Return the pictures of steps, on one scale."""
    both = [(n, t) for n, t in (("predicted", extras.predicted), ("measured", extras.measured)) if t is not None]
    longest = max((timeline.seconds for _, timeline in both), default=0.0)
    # the template of the picture has escaped it
    return [(name, timeline, Markup(timeline_svg(timeline, "auto", longest))) for name, timeline in both]


def memory_rows(predicted: Timeline | None) -> list[dict[str, Any]]:
    """The peak of each rank that differs from others."""
    rows = predicted.rows if predicted else ()
    return [{"name": row.name, "peak": row.peak, "kept": row.peak_held} for row in rows[:64]]
