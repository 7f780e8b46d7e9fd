"""Arguments and options that several verbs have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..api.compile import compile as compile_model
from ..api.compiled_program import CompiledProgram
from ..core.mesh import Mesh
from ..core.progress import working
from ..cost_models.calibrated import CalibratedCosts
from ..cost_models.calibration import Calibration
from ..ir.plan import read_plan
from .targets import load_target

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="package.module:builder, a function that returns model, batch[, loss_fn]; "
        "or hf:CONFIG.json[,rows=8,sequence=1024], a Hugging Face configuration",
    ),
]
MeshOption = Annotated[
    str | None, typer.Option(help="axis sizes, outermost first: pp=2,dp=2,tp=2; without it, the plan's")
]
PlanOption = Annotated[Path | None, typer.Option(help="a plan file; without it, the default rules")]
Microbatches = Annotated[int | None, typer.Option(min=1, help="parts of the batch in time")]
CalibrationOption = Annotated[Path | None, typer.Option(help="of quintnet calibrate; without it, H100 GPUs")]
Gpu = Annotated[str, typer.Option(help="kind of device: h100, a100-80, b200, ...")]
Nodes = Annotated[int, typer.Option(min=1, help="nodes of the cluster")]
GpusPerNode = Annotated[int | None, typer.Option(min=1, help="devices of a node, if not the usual")]
Json = Annotated[bool, typer.Option("--json", help="print the answer as JSON, and nothing else")]


def parse_mesh(text: str) -> Mesh:
    """A mesh from ``pp=2,dp=2``.

    Raises:
        typer.BadParameter: if the text is not of this form.
        CompileError: QN201 if it is, and no mesh.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not size.strip().isdecimal() or name.strip() in sizes:
            raise typer.BadParameter(
                f"{part!r} is not AXIS=SIZE; write for example pp=2,dp=2,tp=2", param_hint="--mesh"
            )
        sizes[name.strip()] = int(size)
    return Mesh(**sizes)


def costs_of(calibration: Path | None) -> CalibratedCosts | None:
    """What times are predicted from; None: the usual.

    Raises:
        CompileError: QN211 if the file is no calibration.
    """
    return CalibratedCosts(Calibration.load(calibration)) if calibration else None


def compiled(target: str, mesh: str | None, plan: Path | None, microbatches: int | None) -> CompiledProgram:
    """The program of a target.

    Raises:
        typer.BadParameter: if there is no such target, or no mesh.
        CompileError: see :func:`quintnet.compile`.
    """
    decided = read_plan(plan)
    if mesh is None and not decided.mesh:
        raise typer.BadParameter("give one, or a plan that has one", param_hint="--mesh")
    chosen = parse_mesh(mesh) if mesh is not None else Mesh(**decided.mesh)
    model, batch, loss_fn = load_target(target)
    with working(f"compiling for {chosen}"):
        return compile_model(model, chosen, batch, loss_fn=loss_fn, plan=decided, microbatches=microbatches)
