"""``quintnet estimate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..api.plan import estimate as make_estimate
from ..core.progress import working
from ..cost_models.cluster import Cluster
from ..ir.plan import read_plan
from .answer import Answer
from .options import Gpu, GpusPerNode, Json, Nodes, Set, Target, settings_of
from .targets import load_target


def estimate(
    target: Target,
    plan: Annotated[Path, typer.Option(help="the plan file")],
    settings: Set = None,
    gpu: Gpu = "h100",
    nodes: Nodes = 1,
    gpus_per_node: GpusPerNode = None,
    json: Json = False,
) -> Answer:
    """Step time, memory per rank, communication and bubble of a plan, without any device.

    Exit code: 0, 2 usage, 4 the model or the layout is not supported.

    Example: quintnet estimate mymodel:build --plan plan.json --gpu h100 --nodes 8

    Example: quintnet estimate mymodel:build --plan plan.json --nodes 8 --set recompute=full
    """
    decided = read_plan(plan).changed(settings_of(settings))
    cluster = Cluster(gpu, nodes, gpus_per_node)
    model, batch, loss_fn = load_target(target)
    with working("estimating"):
        return Answer.of(make_estimate(model, cluster, batch, decided, loss_fn=loss_fn))
