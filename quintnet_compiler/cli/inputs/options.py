"""Arguments and options that several verbs have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...core.errors import CompileError
from ...core.progress import working
from ...ir.plan_options import PlanOptions, read_options
from .targets import load_target

if TYPE_CHECKING:
    from ...api.compiled_program import CompiledProgram
    from ...core.mesh import Mesh
    from ...cost_models.calibrated import CalibratedCosts
    from ...ir.plan import Plan

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
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="NAME=VALUE",
        help=f"a decision in place of the plan's, as zero=3; repeatable; {', '.join(PlanOptions.__annotations__)}",
    ),
]
CalibrationOption = Annotated[Path | None, typer.Option(help="of quintnet calibrate; without it, H100 GPUs")]
DeviceOption = Annotated[
    str | None,
    typer.Option(
        metavar="cuda|cpu",
        help="where ranks run; cuda also where there is none: the program that H100 GPUs would run",
    ),
]
Gpu = Annotated[
    str,
    typer.Option(
        metavar="KIND|FILE.json",
        help="kind of device: h100, rtx-4090, ...; several kinds of nodes, as a100:2+h100:1 (2 nodes and 1), or of "
        "cards in a node, as rtx-4090,rtx-3090; or a JSON file that describes a device or a cluster",
    ),
]
Nodes = Annotated[int, typer.Option(min=1, help="nodes of the cluster")]
GpusPerNode = Annotated[int | None, typer.Option(min=1, help="devices of a node, if not the usual")]
PrecisionOption = Annotated[
    str | None, typer.Option(metavar="model|bf16|fp16|fp8", help="mixed precision; as --set precision=...")
]
Tokens = Annotated[
    float | None, typer.Option(help="tokens to train on (rows, where batches have none), as 1e12: what that takes")
]
Price = Annotated[float | None, typer.Option(help="of an hour of one device, in any currency: what training costs")]
Json = Annotated[bool, typer.Option("--json", help="print the answer as JSON, and nothing else")]


def parse_mesh(text: str) -> Mesh:
    """A mesh from ``pp=2,dp=2``.

    Raises:
        typer.BadParameter: if the text is not of this form.
        CompileError: QN201 if it is, and no mesh.
    """
    from ...core.mesh import Mesh

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
    """Return the prices of a calibration; None: the default ones.

    Raises:
        CompileError: QN211 if the file is no calibration.
    """
    from ...cost_models.calibrated import CalibratedCosts
    from ...cost_models.calibration import Calibration

    return CalibratedCosts(Calibration.load(calibration)) if calibration else None


def settings_of(texts: list[str] | None, precision: str | None = None) -> dict[str, Any]:
    """Return the decisions of ``--set`` and ``--precision``, with values that a plan can have.

    Raises:
        typer.BadParameter: with what is possible.
    """
    from ...ir.plan import Plan

    if precision is not None:
        texts = [*(texts or ()), f"precision={precision}"]
    try:
        decisions = read_options(texts or ())
        Plan().changed(decisions)
    except (ValueError, CompileError) as error:
        message = error.message if isinstance(error, CompileError) else str(error)
        raise typer.BadParameter(message, param_hint="--set") from None
    return decisions


@dataclass(frozen=True)
class ProgramOptions:
    """The mesh and the plan that a verb's options ask for."""

    mesh: Mesh
    plan: Plan

    @classmethod
    def from_arguments(
        cls, mesh: str | None, plan: Path | None, microbatches: int | None = None, settings: list[str] | None = None,
        precision: str | None = None,
    ) -> ProgramOptions:  # fmt: skip
        """Read options.

        Raises:
            typer.BadParameter: if an option is not valid, or there is no mesh.
        """
        from ...core.mesh import Mesh
        from ...ir.plan import read_plan

        changes, decided = settings_of(settings, precision), read_plan(plan)
        if microbatches is not None and changes.setdefault("microbatches", microbatches) != microbatches:
            raise typer.BadParameter("says another number than --set microbatches", param_hint="--microbatches")
        if mesh is None and not decided.mesh:
            raise typer.BadParameter("give one, or a plan that has one", param_hint="--mesh")
        return cls(parse_mesh(mesh) if mesh is not None else Mesh(**decided.mesh), decided.changed(changes))


def build_program(target: str, options: ProgramOptions, device: str | None = None) -> CompiledProgram:
    """The program of a target; for ``device``, or where its model is.

    Raises:
        typer.BadParameter: if there is no such target.
        CompileError: see :func:`quintnet.compile`.
    """
    from ...api.compile import compile as compile_model

    model, batch, loss_fn = load_target(target)
    with working(f"compiling for {options.mesh}"):
        return compile_model(model, options.mesh, batch, loss_fn=loss_fn, plan=options.plan, device=_known(device))


def _known(device: str | None) -> str | None:
    if device in (None, "cpu", "cuda"):
        return device
    raise typer.BadParameter(f"{device!r} is neither cuda nor cpu", param_hint="--device")
