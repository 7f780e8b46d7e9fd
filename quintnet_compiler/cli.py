"""The command ``quintnet``."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from .advise import estimate as make_estimate
from .advise import plan as make_plan
from .api import compile as compile_model
from .calibrate import calibrate as measure_machine
from .cost_models.calibrated import CalibratedCosts
from .cost_models.calibration import Calibration
from .cost_models.cluster import Cluster
from .errors import QuintNetError
from .mesh import Mesh
from .runtime.launch import launch
from .training.config import TrainConfig
from .training.run import run as run_training

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Train a plain nn.Module on any number of GPUs.")
Target = Annotated[
    str,
    typer.Argument(metavar="TARGET", help="package.module:builder, a function that returns model, batch[, loss_fn]"),
]
MeshOption = Annotated[str, typer.Option(help="axis sizes, outermost first: pp=2,dp=2,tp=2")]

# exit codes
USAGE, UNSUPPORTED, NOT_EQUAL, RANK_FAULT, CHECKPOINT, NOT_FINITE = 2, 4, 5, 6, 7, 8


@app.callback()
def quintnet() -> None:
    """Train a plain nn.Module on any number of GPUs."""


@app.command()
def verify(
    target: Target,
    mesh: MeshOption,
    plan: Annotated[Path | None, typer.Option(help="a plan file; without it, the default rules")] = None,
    microbatches: Annotated[int | None, typer.Option(help="parts of the batch in time")] = None,
    steps: Annotated[int, typer.Option(min=1, help="training steps to compare")] = 2,
    float64: Annotated[bool, typer.Option("--float64", help="compare in float64")] = False,
    limit: Annotated[float | None, typer.Option(help="the relative error that counts as equal")] = None,
    json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
) -> None:
    """Compare all ranks of a compiled program with the model itself, in this process.

    Exit code: 0 equal, 2 usage, 4 the model or the layout is not supported, 5 not equal, 6 ranks disagree, 8 a value
    is not finite.

    Example: quintnet verify mymodel:build --mesh dp=2,tp=2 --float64
    """
    model, batch, loss_fn = load_target(target)
    program = compile_model(model, parse_mesh(mesh), batch, loss_fn=loss_fn, plan=plan, microbatches=microbatches)
    report = program.verify(steps=steps, float64=float64, limit=limit)
    typer.echo(report.to_json() if json else str(report))
    raise typer.Exit(0 if report.ok else NOT_EQUAL)


@app.command()
def plan(
    target: Target,
    gpu: Annotated[str, typer.Option(help="kind of device: h100, a100-80, b200, ...")] = "h100",
    nodes: Annotated[int, typer.Option(min=1, help="nodes of the cluster")] = 1,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="devices of a node, if not the usual")] = None,
    plan: Annotated[Path | None, typer.Option(help="a plan file with decisions that are made already")] = None,
    top: Annotated[int, typer.Option(min=1, help="how many plans to show")] = 5,
    seconds: Annotated[float, typer.Option(help="when to stop searching")] = 35.0,
    out: Annotated[Path | None, typer.Option(help="write the best plan here, for compile(plan=...)")] = None,
    json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
) -> None:
    """The best ways to train a model on a cluster, without any device.

    Exit code: 0, 2 usage, 4 the model is not supported, or nothing fits the cluster.

    Example: quintnet plan mymodel:build --gpu h100 --nodes 8 --out plan.json
    """
    model, batch, loss_fn = load_target(target)
    cluster = Cluster(gpu, nodes, gpus_per_node)
    report = make_plan(model, cluster, batch, loss_fn=loss_fn, plan=plan, top_k=top, seconds=seconds)
    if out:
        report.best.save(out)
    typer.echo(report.to_json() if json else str(report))


@app.command()
def estimate(
    target: Target,
    plan: Annotated[Path, typer.Option(help="the plan file")],
    gpu: Annotated[str, typer.Option(help="kind of device: h100, a100-80, b200, ...")] = "h100",
    nodes: Annotated[int, typer.Option(min=1, help="nodes of the cluster")] = 1,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="devices of a node, if not the usual")] = None,
    json: Annotated[bool, typer.Option("--json", help="print the estimate as JSON")] = False,
) -> None:
    """Step time, memory per rank, communication and bubble of a plan, without any device.

    Exit code: 0, 2 usage, 4 the model or the layout is not supported.

    Example: quintnet estimate mymodel:build --plan plan.json --gpu h100 --nodes 8
    """
    model, batch, loss_fn = load_target(target)
    found = make_estimate(model, Cluster(gpu, nodes, gpus_per_node), batch, plan, loss_fn=loss_fn)
    typer.echo(found.to_json() if json else str(found))


@app.command()
def simulate(
    target: Target,
    mesh: MeshOption,
    plan: Annotated[Path | None, typer.Option(help="a plan file; without it, the default rules")] = None,
    microbatches: Annotated[int | None, typer.Option(help="parts of the batch in time")] = None,
    calibration: Annotated[Path | None, typer.Option(help="of quintnet calibrate; without it, H100 GPUs")] = None,
    html: Annotated[Path | None, typer.Option(help="write a page with a picture here")] = None,
    trace: Annotated[Path | None, typer.Option(help="write a trace for Perfetto here")] = None,
    json: Annotated[bool, typer.Option("--json", help="print the report as JSON")] = False,
) -> None:
    """A step of a compiled program, without any device: who does what when, who waits, and how much memory it takes.

    Exit code: 0, 2 usage, 4 the model or the layout is not supported.

    Example: quintnet simulate mymodel:build --mesh pp=4,tp=2 --microbatches 16 --html step.html
    """
    model, batch, loss_fn = load_target(target)
    program = compile_model(model, parse_mesh(mesh), batch, loss_fn=loss_fn, plan=plan, microbatches=microbatches)
    costs = CalibratedCosts(Calibration.load(calibration)) if calibration else None
    report = program.simulate(costs)
    if html:
        html.write_text(report.html())
    if trace:
        trace.write_text(report.chrome_trace())
    typer.echo(report.to_json() if json else str(report))


@app.command()
def calibrate(
    out: Annotated[Path | None, typer.Option(help="write the calibration here")] = None,
    ranks: Annotated[list[int] | None, typer.Option(help="measure collectives over so many processes")] = None,
    json: Annotated[bool, typer.Option("--json", help="print the calibration as JSON")] = False,
) -> None:
    """Measure how long operators and collectives take on this machine. Nothing else should run meanwhile.

    Exit code: 0, 2 usage, 6 a process failed.

    Example: quintnet calibrate --ranks 2 --ranks 4 --out machine.json
    """
    found = measure_machine(tuple(ranks or (2,)))
    if out:
        found.save(out)
    typer.echo(found.model_dump_json(indent=1) if json else found.summary())


def parse_mesh(text: str) -> Mesh:
    """A mesh from ``pp=2,dp=2``.

    Raises:
        typer.BadParameter: if the text is not of this form.
        CompileError: QN201 if it is, and no mesh.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not size.strip().isdigit() or name.strip() in sizes:
            raise typer.BadParameter(
                f"{part!r} is not AXIS=SIZE; write for example pp=2,dp=2,tp=2", param_hint="--mesh"
            )
        sizes[name.strip()] = int(size)
    return Mesh(**sizes)


def load_target(target: str) -> tuple[Any, Any, Any]:
    """Model, batch and loss function (or None) from ``package.module:builder``. The module is imported.

    Raises:
        typer.BadParameter: if there is no such function, or it returns something else.
    """
    module, _, name = target.partition(":")
    if not name or not all(part.isidentifier() for part in (*module.split("."), *name.split("."))):
        raise typer.BadParameter(f"{target!r} is not package.module:builder", param_hint="TARGET")
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        builder: Any = importlib.import_module(module)
        for part in name.split("."):
            builder = getattr(builder, part)
    except (ImportError, AttributeError) as error:
        raise typer.BadParameter(f"{target!r} cannot be loaded: {error}", param_hint="TARGET") from error
    made = builder()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise typer.BadParameter(f"{target!r} must return model, batch[, loss_fn]", param_hint="TARGET")
    return made[0], made[1], made[2] if len(made) == 3 else None


@app.command()
def train(
    config: Annotated[Path, typer.Argument(help="a YAML file with the keys of quintnet.TrainConfig")],
    changes: Annotated[list[str] | None, typer.Argument(metavar="KEY=VALUE...", help="in place of the file's")] = None,
    nproc: Annotated[int | None, typer.Option(min=1, help="processes here; without it, as many as the mesh")] = None,
    json: Annotated[bool, typer.Option("--json", help="print what was done as JSON")] = False,
) -> None:
    """Train a model as a file says, going on from the newest checkpoint if there is one.

    Starts local processes; under torchrun this process is one rank. With --nproc 1, all ranks run in one process.

    Exit code: 0, 2 usage, 4 the model, the layout or the file is not supported, 6 a rank failed, 7 a checkpoint,
    8 a value is not finite.

    Example: quintnet train examples/vit_digits.yaml num_epochs=5
    """
    given = [one.partition("=") for one in changes or ()]
    if any(not sign for _, sign, _ in given):
        raise typer.BadParameter("write key=value", param_hint="KEY=VALUE")
    found = TrainConfig.read(config, **{key: yaml.safe_load(value) for key, _, value in given})
    ranks = nproc or found.mesh.size
    histories = [run_training(found)] if ranks == 1 else launch(run_training, ranks, (found,))
    history = next(one for one in histories if one is not None)
    if json:
        typer.echo(dumps(asdict(history)))


def main() -> None:
    """Run the command line; errors are a few lines on stderr and an exit code."""
    try:
        app()
    except QuintNetError as error:
        typer.echo(str(error), err=True)
        codes = {"3": RANK_FAULT, "4": RANK_FAULT, "5": NOT_FINITE, "6": CHECKPOINT}
        raise SystemExit(codes.get(error.code[2], UNSUPPORTED)) from None
