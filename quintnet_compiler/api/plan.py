"""The public face of the planner: ``quintnet.plan`` and ``quintnet.estimate``. No device is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..capture.capture import capture
from ..capture.step_module import LossFn
from ..core.errors import CompileError
from ..core.mesh import Mesh
from ..core.progress import bar
from ..core.replaced import one_thread
from ..cost_models.cluster import Cluster
from ..ir.batch_form import batch_size_of, plain_batch
from ..ir.plan import Plan, check_plan, read_plan
from ..ops.rules.notation import Rule, table
from ..ops.rules.table import RULES
from ..planner.estimate import Estimate
from ..planner.planning import Planner, PricedCluster, plan_model
from ..planner.report import PlanReport
from ..planner.search import Objective, SearchEffort
from ..schedules.synthesis import check_schedule

Given = Plan | Mapping[str, Any] | str | Path | None


@one_thread()
def plan(
    model: nn.Module,
    cluster: Cluster,
    batch: Any,
    *,
    loss_fn: LossFn | None = None,
    plan: Given = None,
    rules: Sequence[Rule] = (),
    top_k: int = 5,
    objective: Objective = "time",
    work: float = SearchEffort.work,
    seconds: float = SearchEffort.seconds,
    progress: bool | None = None,
) -> PlanReport:
    """Search the layouts of ``model`` on ``cluster`` for batches like ``batch``, and rank them. No device is needed.

    Args:
        model: any model that :func:`quintnet.compile` takes; on the meta device it costs no memory.
        cluster: e.g. ``quintnet.Cluster("h100", nodes=8)``.
        batch: one global batch; meta tensors are enough.
        loss_fn: as in :func:`quintnet.compile`.
        plan: fixed decisions; the planner makes the others.
        rules: sharding rules for further operators.
        top_k: how many plans to return.
        objective: what to minimise: seconds of a step (``"time"``), bytes on the fullest rank (``"memory"``), or
            device-seconds per token (``"cost"``), for which plans may use fewer nodes.
        work: how many operators to compile in the search if there are too many layouts to prove which is best. The
            same work gives the same plan on every machine; twice as much takes about twice as long.
        seconds: when to stop searching in any case. The report says whether anything was left, and why.
        progress: whether to show a bar; by default on a terminal.

    Raises:
        CompileError: QN1xx if the model cannot be captured, QN2xx for the plan; QN212 if nothing fits the cluster's
            memory, with the smallest change after which something does.
    """
    planner = _planner(model, cluster, batch, loss_fn, read_plan(plan), rules)
    with bar("layouts settled", progress) as shown:
        return plan_model(planner, top_k=top_k, objective=objective, effort=SearchEffort(work, seconds), progress=shown)


@one_thread()
def estimate(
    model: nn.Module,
    cluster: Cluster,
    batch: Any,
    plan: Given,
    *,
    loss_fn: LossFn | None = None,
    rules: Sequence[Rule] = (),
) -> Estimate:
    """Predict step time, memory per rank, communication and bubble of one plan, which must have a mesh.

    Raises:
        CompileError: as :func:`quintnet.plan`; QN207 if the plan has no mesh, QN301 if it does not fit the cluster.
    """
    chosen = read_plan(plan)
    if not chosen.mesh:
        raise CompileError("QN207", "the plan has no mesh", fix="give one, or ask quintnet.plan for plans")
    mesh = Mesh(**chosen.mesh)
    check_plan(chosen, mesh)
    if mesh.size > cluster.size:
        raise CompileError(
            "QN301", f"{mesh} has {mesh.size} ranks, and the cluster {cluster.size} devices",
            fix=f"use a cluster of {-(-mesh.size // cluster.gpus_per_node)} nodes",
        )  # fmt: skip
    return _planner(model, cluster, batch, loss_fn, chosen, rules).estimate()


def _planner(
    model: nn.Module, cluster: Cluster, batch: Any, loss_fn: LossFn | None, pinned: Plan, rules: Sequence[Rule]
) -> Planner:
    if not isinstance(cluster, Cluster):
        raise CompileError(
            "QN201", f"a {type(cluster).__name__} is not a cluster", fix='pass quintnet.Cluster("h100", nodes=8)'
        )
    decided = "virtual_stages" in pinned.model_fields_set
    check_schedule(pinned.schedule, pinned.virtual_stages if decided else None)
    batch = plain_batch(batch)
    captured = capture(model, batch, loss_fn, once=not pinned.parameters)  # a plan may single blocks out
    book = {**RULES, **table(rules)}
    unknown = "memory" if rules or pinned.unknown_ops == "replicate" else "error"
    return Planner.of(captured, batch_size_of(batch), PricedCluster(cluster, unknown), pinned, book)
