"""``quintnet measure``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..core.mesh import Mesh
from ..core.progress import working
from ..ir.plan import read_plan
from ..runtime.launch.launch import launch
from ..simulation.timeline import Timeline
from .answer import Answer
from .options import Json, MeshOption, Microbatches, PlanOption, Target, compiled, parse_mesh
from .targets import load_target


def measure(
    target: Target,
    mesh: MeshOption = None,
    plan: PlanOption = None,
    microbatches: Microbatches = None,
    steps: Annotated[int, typer.Option(min=1, help="steps before the one that counts")] = 3,
    out: Annotated[Path | None, typer.Option(help="write the timeline here, for quintnet dump --measured")] = None,
    html: Annotated[Path | None, typer.Option(help="write a page with a picture here")] = None,
    json: Json = False,
) -> Answer:
    """Run training steps in a process for each rank, and say who did what when in the last one.

    Starts local processes; under torchrun this process is one rank. Nothing is trained for good.

    Exit code: 0, 2 usage, 4 the model or the layout is not supported, 6 a rank failed, 8 a value is not finite.

    Example: quintnet measure mymodel:build --mesh pp=2,tp=2 --microbatches 8 --out step.json
    """
    size = _size(mesh, plan)
    load_target(target)  # what is wrong with it is said here, once
    with working(f"running {steps + 1} steps on {size} ranks"):
        found: list[Timeline | None] = launch(_rank, size, (target, mesh, plan, microbatches, steps))
    timeline = next(one for one in found if one is not None)
    if out:
        timeline.save(out)
    if html:
        html.write_text(timeline.html(), encoding="utf-8")
    return Answer.of(timeline)


def _size(mesh: str | None, plan: Path | None) -> int:
    decided = read_plan(plan)
    if mesh is None and not decided.mesh:
        raise typer.BadParameter("give one, or a plan that has one", param_hint="--mesh")
    return (parse_mesh(mesh) if mesh is not None else Mesh(**decided.mesh)).size


def _rank(target: str, mesh: str | None, plan: Path | None, microbatches: int | None, steps: int) -> Timeline:
    program, batch = compiled(target, mesh, plan, microbatches), load_target(target)[1]
    for _ in range(steps):
        program.step(batch)
        program.zero_grad()
    return program.measure(batch)[1]
