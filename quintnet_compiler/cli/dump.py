"""``quintnet dump``."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated

import typer

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


def dump(
    target: Target,
    out: Annotated[Path, typer.Option(help="the folder; files of an earlier dump are replaced")],
    mesh: MeshOption = None,
    plan: PlanOption = None,
    microbatches: Microbatches = None,
    settings: Set = None,
    device: DeviceOption = None,
    measured: Annotated[Path | None, typer.Option(help="a step of quintnet measure, to show beside")] = None,
    calibration: CalibrationOption = None,
    json: Json = False,
) -> Answer:
    """Write all that runs as files, and a page to look at it: index.html, which needs no network.

    Exit code: 0, 2 usage, 4 the model or the layout is not supported.

    Example: quintnet dump mymodel:build --mesh pp=2,tp=2 --out out

    Example: quintnet dump mymodel:build --mesh pp=2,tp=2 --device cuda --out out

    Example: quintnet dump mymodel:build --mesh pp=2,tp=2 --out out --measured step.json --calibration machine.json
    """
    from ..simulation.timeline import Timeline

    costs, real = costs_of(calibration), Timeline.load(measured) if measured else None
    program = build_program(target, ProgramOptions.from_arguments(mesh, plan, microbatches, settings), device)
    with working("writing"):
        write_output("--out", out, lambda folder: program.dump(folder, costs=costs, measured=real))
    manifest = json_module.loads((out / "manifest.json").read_text(encoding="utf-8"))
    text = f"{len(manifest['files'])} files in {out}; open {out / 'index.html'}"
    return Answer(text, json_module.dumps({"folder": str(out), **manifest}, indent=2))
