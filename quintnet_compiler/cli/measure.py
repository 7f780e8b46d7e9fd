"""``quintnet measure``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..core.files import save_text
from ..core.progress import working
from .answer import Answer, write_output
from .inputs.options import Json, MeshOption, Microbatches, PlanOption, ProgramOptions, Set, Target, build_program
from .inputs.targets import load_target

if TYPE_CHECKING:
    from ..simulation.timeline import Timeline


def measure(
    target: Target,
    mesh: MeshOption = None,
    plan: PlanOption = None,
    microbatches: Microbatches = None,
    settings: Set = None,
    steps: Annotated[int, typer.Option(min=1, help="steps before the one that counts")] = 3,
    out: Annotated[Path | None, typer.Option(help="write the timeline here, for quintnet dump --measured")] = None,
    html: Annotated[Path | None, typer.Option(help="write a page with a picture here")] = None,
    json: Json = False,
) -> Answer:
    """Run training steps in a process for each rank, and say who did what when in the last one.

    Starts local processes; under torchrun this process is one rank. Nothing is trained for good.

    Exit code: 0, 2 usage, 4 the model or the options is not supported, 6 a rank failed, 8 a value is not finite.

    Example: quintnet measure mymodel:build --mesh pp=2,tp=2 --microbatches 8 --out step.json
    """
    from ..runtime.launch.launch import launch

    options = ProgramOptions.from_arguments(mesh, plan, microbatches, settings)
    size = options.mesh.size
    load_target(target)  # what is wrong with it is said here, once
    with working(f"running {steps + 1} steps on {size} ranks"):
        timelines: list[Timeline | None] = launch(_rank, size, (target, options, steps))
    timeline = next(timeline for timeline in timelines if timeline is not None)
    write_output("--out", out, timeline.save)
    write_output("--html", html, lambda path: save_text(path, timeline.html()))
    return Answer.from_report(timeline)


def _rank(target: str, options: ProgramOptions, steps: int) -> Timeline:
    program, batch = build_program(target, options), load_target(target)[1]
    for _ in range(steps):
        program.step(batch)
        program.zero_grad()
    return program.measure(batch)[1]
