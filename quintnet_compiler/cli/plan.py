"""``quintnet plan``."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from ..planner.search import RESERVED_SHARE, Objective, SearchEffort
from .answer import Answer, write_output
from .inputs.options import Gpu, GpusPerNode, Json, Nodes, PrecisionOption, Price, Set, Target, Tokens, settings_of
from .inputs.targets import load_target

if TYPE_CHECKING:
    from ..cost_models.cluster import Cluster
    from ..planner.compare import Versus
    from ..planner.curves import ParetoFront, ScalingCurve, Sweep


def plan(
    target: Target,
    gpu: Gpu = "h100",
    nodes: Nodes = 1,
    gpus_per_node: GpusPerNode = None,
    plan: Annotated[Path | None, typer.Option(help="a plan file with decisions that are made already")] = None,
    settings: Set = None,
    precision: PrecisionOption = None,
    objective: Annotated[
        Objective, typer.Option(metavar="|".join(get_args(Objective)), help="what the best plan has the least of")
    ] = "time",
    tokens: Tokens = None,
    price: Price = None,
    reserve: Annotated[
        float, typer.Option(help="the share of a device's memory that plans leave free")
    ] = RESERVED_SHARE,
    top: Annotated[int, typer.Option(min=1, help="how many plans to show")] = 5,
    work: Annotated[
        float, typer.Option(min=1, help="how many operators to compile in the search; the same plan on every machine")
    ] = SearchEffort.work,
    seconds: Annotated[float, typer.Option(help="when to stop searching in any case")] = SearchEffort.seconds,
    out: Annotated[Path | None, typer.Option(help="write the best plan here, for compile(plan=...)")] = None,
    front: Annotated[bool, typer.Option("--front", help="also the fastest plans for ever less memory")] = False,
    scaling: Annotated[bool, typer.Option("--scaling", help="also plans for fewer and for more devices")] = False,
    beside: Annotated[
        str | None, typer.Option(metavar="GPU[:NODES[:PRICE]]", help="another cluster, whose best plan is compared")
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE,...",
            help="also the best plan for each value of devices, network (bytes a second of a node), rows or length",
        ),
    ] = None,
    among: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE,...", help="values of a decision (precision, loss_chunks), each searched"),
    ] = None,
    json: Json = False,
) -> Answer:
    """The best ways to train a model on a cluster, without any device.

    Exit code: 0, 2 usage, 3 nothing fits the cluster, 4 the model is not supported.

    Example: quintnet plan mymodel:build --gpu h100 --nodes 8 --out plan.json

    Example: quintnet plan mymodel:build --gpu a100:1+h100:2 --precision bf16

    Example: quintnet plan mymodel:build --nodes 8 --precision bf16 --set zero=3

    Example: quintnet plan mymodel:build --nodes 8 --objective cost --tokens 1e12 --price 2.5

    Example: quintnet plan mymodel:build --nodes 8 --price 2.5 --front --scaling --beside b200:4:5

    Example: quintnet plan mymodel:build --nodes 8 --among precision=model,bf16 --among loss_chunks=1,8

    Example: quintnet plan mymodel:build --nodes 8 --sweep network=50e9,100e9,400e9 --sweep rows=64,128,256
    """
    from ..api.cluster_text import read_cluster
    from ..api.plan import plan as make_plan
    from ..ir.plan import read_plan

    sweeps = [_sweep(text) for text in sweep or ()]
    alternatives = dict(_listed(text) for text in among or ())
    other, other_price = _beside(beside) if beside else (None, None)
    pinned = read_plan(plan).changed(settings_of(settings, precision), keep_open=True)
    cluster = read_cluster(gpu, nodes, gpus_per_node)
    model, batch, loss_fn = load_target(target)
    report = make_plan(
        model, cluster, batch, loss_fn=loss_fn, plan=pinned, top_k=top, objective=objective, work=work,
        seconds=seconds, tokens=tokens, price=price, reserve=reserve, among=alternatives,
    )  # fmt: skip
    write_output("--out", out, report.best.save)
    more: dict[str, ParetoFront | ScalingCurve | Versus | Sweep] = {}
    if front:
        more["front"] = report.front()
    if scaling:
        more["scaling"] = report.scaling()
    if other:
        more["beside"] = report.beside(other, price=other_price)
    for name, amounts in sweeps:
        more[f"sweep_{name}"] = report.sweep(name, amounts)
    document = report.numbers() | {name: part.numbers() for name, part in more.items()}
    return Answer("\n\n".join(map(str, (report, *more.values()))), dumps(document, indent=2))


def _sweep(text: str) -> tuple[str, list[float]]:
    """Read the name and the amounts of ``NAME=VALUE,...``, or raise typer.BadParameter."""
    name, _, amounts = text.partition("=")
    try:
        return name, [float(amount) for amount in amounts.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not NAME=VALUE,..., as rows=64,128", param_hint="--sweep") from None


def _listed(text: str) -> tuple[str, list[Any]]:
    """Read the name and the values of ``NAME=VALUE,...``, or raise typer.BadParameter."""
    name, _, values = text.partition("=")
    return name, [settings_of([f"{name}={value}"])[name] for value in values.split(",")]


def _beside(text: str) -> tuple[Cluster, float | None]:
    """Read ``GPU[:NODES[:PRICE]]``, or raise typer.BadParameter, or CompileError QN210 for an unknown device."""
    from ..cost_models.cluster import Cluster

    name, *rest = text.split(":")
    try:
        nodes, price = int(rest[0]) if rest else 1, float(rest[1]) if rest[1:] else None
    except ValueError:
        rest = [text] * 3
    if len(rest) > 2:
        raise typer.BadParameter(f"{text!r} is not GPU[:NODES[:PRICE]], as b200:4:5.5", param_hint="--beside")
    return Cluster(name, nodes), price
