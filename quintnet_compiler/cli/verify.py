"""``quintnet verify``."""

from __future__ import annotations

from typing import Annotated

import typer

from ..core.progress import working
from .answer import NOT_EQUAL, Answer
from .inputs.options import Json, MeshOption, Microbatches, PlanOption, ProgramOptions, Set, Target, build_program


def verify(
    target: Target,
    mesh: MeshOption = None,
    plan: PlanOption = None,
    microbatches: Microbatches = None,
    settings: Set = None,
    steps: Annotated[int, typer.Option(min=1, help="training steps to compare")] = 2,
    float64: Annotated[bool, typer.Option("--float64", help="compare in float64")] = False,
    limit: Annotated[float | None, typer.Option(help="the relative error that counts as equal")] = None,
    json: Json = False,
) -> Answer:
    """Compare all ranks of a compiled program with the model itself, in this process.

    Exit code: 0 equal, 2 usage, 4 not supported, 5 not equal, 6 ranks disagree, 8 a value is not finite.

    Example: quintnet verify mymodel:build --mesh dp=2,tp=2 --float64
    """
    program = build_program(target, ProgramOptions.from_arguments(mesh, plan, microbatches, settings))
    with working(f"comparing {steps} steps"):
        report = program.verify(steps=steps, float64=float64, limit=limit)
    return Answer.from_report(report, 0 if report.ok else NOT_EQUAL)
