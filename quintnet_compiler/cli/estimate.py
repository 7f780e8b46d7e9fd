"""``quintnet estimate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..api.plan import estimate as make_estimate
from ..core.progress import working
from ..cost_models.cluster import Cluster
from .answer import Answer
from .options import Gpu, GpusPerNode, Json, Nodes, Target
from .targets import load_target


def estimate(
    target: Target,
    plan: Annotated[Path, typer.Option(help="the plan file")],
    gpu: Gpu = "h100",
    nodes: Nodes = 1,
    gpus_per_node: GpusPerNode = None,
    json: Json = False,
) -> Answer:
    """Step time, memory per rank, communication and bubble of a plan, without any device.

    Exit code: 0, 2 usage, 4 the model or the layout is not supported.

    Example: quintnet estimate mymodel:build --plan plan.json --gpu h100 --nodes 8
    """
    cluster = Cluster(gpu, nodes, gpus_per_node)
    model, batch, loss_fn = load_target(target)
    with working("estimating"):
        return Answer.of(make_estimate(model, cluster, batch, plan, loss_fn=loss_fn))
