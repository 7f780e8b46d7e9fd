"""``quintnet simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..core.files import save_text
from ..core.progress import working
from .answer import Answer, write_output
from .inputs.options import (
    CalibrationOption,
    DeviceOption,
    Json,
    MeshOption,
    Microbatches,
    PlanOption,
    ProgramOptions,
    Set,
    Target,
    build_program,
    costs_of,
)


def simulate(
    target: Target,
    mesh: MeshOption = None,
    plan: PlanOption = None,
    microbatches: Microbatches = None,
    settings: Set = None,
    device: DeviceOption = None,
    calibration: CalibrationOption = None,
    html: Annotated[Path | None, typer.Option(help="write a page with a picture here")] = None,
    trace: Annotated[Path | None, typer.Option(help="write a trace for Perfetto here")] = None,
    json: Json = False,
) -> Answer:
    """A step of a compiled program, without any device: who does what when, who waits, and how much memory it takes.

    Exit code: 0, 2 usage, 4 the model or the layout is not supported.

    Example: quintnet simulate mymodel:build --mesh pp=4,tp=2 --microbatches 16 --html step.html
    """
    costs = costs_of(calibration)
    program = build_program(target, ProgramOptions.from_arguments(mesh, plan, microbatches, settings), device)
    with working("simulating"):
        report = program.simulate(costs)
    write_output("--html", html, lambda path: save_text(path, report.html()))
    write_output("--trace", trace, lambda path: save_text(path, report.chrome_trace()))
    return Answer.from_report(report)
