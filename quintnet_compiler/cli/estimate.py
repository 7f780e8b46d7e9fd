"""``quintnet estimate``."""

from __future__ import annotations

from ..core.progress import working
from .answer import Answer
from .inputs.options import (
    Gpu,
    GpusPerNode,
    Json,
    MeshOption,
    Microbatches,
    Nodes,
    PlanOption,
    PrecisionOption,
    Price,
    ProgramOptions,
    Set,
    Target,
    Tokens,
)
from .inputs.targets import load_target


def estimate(
    target: Target,
    plan: PlanOption = None,
    mesh: MeshOption = None,
    microbatches: Microbatches = None,
    settings: Set = None,
    precision: PrecisionOption = None,
    tokens: Tokens = None,
    price: Price = None,
    gpu: Gpu = "h100",
    nodes: Nodes = 1,
    gpus_per_node: GpusPerNode = None,
    json: Json = False,
) -> Answer:
    """Step time, memory per rank, communication and bubble of a plan, without any device; tokens a second, model FLOP
    utilisation, energy and cost.

    Exit code: 0, 2 usage, 4 the model or the layout is not supported.

    Example: quintnet estimate mymodel:build --plan plan.json --gpu h100 --nodes 8

    Example: quintnet estimate mymodel:build --plan plan.json --nodes 8 --set recompute=full

    Example: quintnet estimate mymodel:build --mesh dp=4,tp=2 --precision bf16 --tokens 1e12 --price 2.5
    """
    from ..api.cluster_text import read_cluster
    from ..api.plan import estimate as make_estimate
    from ..ir.plan import check_plan

    options = ProgramOptions.from_arguments(mesh, plan, microbatches, settings, precision)
    check_plan(options.plan, options.mesh)
    decided = options.plan.changed({"mesh": dict(options.mesh.axes)})
    cluster = read_cluster(gpu, nodes, gpus_per_node)
    model, batch, loss_fn = load_target(target)
    with working("estimating"):
        result = make_estimate(model, cluster, batch, decided, loss_fn=loss_fn, tokens=tokens, price=price)
        return Answer.from_report(result)
