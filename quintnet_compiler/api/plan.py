"""The public face of the planner: ``quintnet.plan`` and ``quintnet.estimate``. No device is needed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn

from ..capture.capture import capture
from ..capture.step_module import LossFn
from ..core.axes import AXES
from ..core.errors import CompileError
from ..core.mesh import Mesh
from ..core.progress import bar
from ..core.replaced import new_garbage_only, one_thread
from ..cost_models.cluster import Cluster
from ..ir.batch_form import BatchForm, FlatBatch, RowsElsewhere, plain_batch
from ..ir.plan import Plan, check_plan, expecting_documents, read_plan
from ..ir.plan_options import ExpectationOptions
from ..ir.plans.feature_fields import check_feature_fields
from ..ops.rules.notation import Rule, user_rules
from ..ops.rules.registered import registered_rules
from ..ops.rules.table import RULES
from ..planner.asking import Question, plan_model
from ..planner.compare import listed
from ..planner.estimate import Estimate
from ..planner.places import PricedCluster
from ..planner.planning import Planner
from ..planner.report import PlanReport
from ..planner.search import RESERVED_SHARE, Objective, SearchEffort
from ..planner.workload import Goal, tokens_of, with_length
from ..runtime.execute.engines import ENGINES, check_engine
from ..schedules.synthesis import check_schedule
from .wrapped_models import refuse_wrapped

Given = Plan | Mapping[str, Any] | str | os.PathLike[str] | None


@one_thread()
@new_garbage_only()
def plan(
    model: nn.Module,
    cluster: Cluster,
    batch: Any,
    *,
    loss_fn: LossFn | None = None,
    plan: Given = None,
    expect: ExpectationOptions | None = None,
    rules: Sequence[Rule] = (),
    top_k: int = 5,
    objective: Objective = "time",
    work: float = SearchEffort.work,
    seconds: float = SearchEffort.seconds,
    tokens: float | None = None,
    price: float | None = None,
    reserve: float = RESERVED_SHARE,
    backend: str = "eager",
    among: Mapping[str, Sequence[Any]] | None = None,
    progress: bool | None = None,
) -> PlanReport:
    """Search the layouts of ``model`` on ``cluster`` for batches like ``batch``, and rank them. No device is needed.

    Args:
        model: any model that :func:`quintnet.compile` takes; on the meta device it costs no memory.
        cluster: e.g. ``quintnet.Cluster("h100", nodes=8)``; of several kinds of nodes with ``quintnet.Cluster.of``.
        batch: one global batch; meta tensors are enough. Where rows hold packed documents and it has values for what
            tells them apart (position ids, ids of documents), their lengths are those that plans
            ``expect``.
        loss_fn: as in :func:`quintnet.compile`.
        plan: fixed decisions; the planner makes the others.
        expect: what prices assume of batches, in place of the plan's ``expect``: see :class:`quintnet.Plan`.
        rules: sharding rules for further operators.
        top_k: how many plans to return.
        objective: what to minimise: seconds of a step (``"time"``); bytes on the fullest rank (``"memory"``): the
            fastest plans of those that take at most a quarter more than the least; or device-seconds per token
            (``"cost"``), for which plans may use fewer nodes.
        work: how many operators to compile in the search if there are too many layouts to prove which is best. The
            same work gives the same plan on every machine; twice as much takes about twice as long. Two thirds of
            it without anything better end the search, too.
        seconds: when to stop searching in any case. The report says whether anything was left, and why.
        tokens: how many to train on, for what that takes and costs; of rows, where batches have no tokens (a tensor of
            whole numbers with two dims).
        price: of an hour of one device, in any currency, for what a million tokens cost.
        reserve: the share of each device's memory that plans leave free, for the CUDA context, libraries, fragments of
            the allocator, and what the prediction misses.
        backend: what will run the plan, as in :func:`quintnet.compile`: with ``"cudagraphs"``, kernels are replayed, so
            the host starts but messages; with any other, it starts every kernel, and small ones wait for it.
        among: several values of decisions that change what a step computes or how, each of which gets a search of its
            own: ``{"precision": ("model", "bf16"), "loss_chunks": (1, 8)}``. Plans are those of the best combination;
            the report has the best of each. Others: ``async_tp``, ``offload``, ``reduce_dtype``, ``sum_dtype``,
            ``sequence_parallel``, ``reshard_after_forward``, ``overlap``, ``context_load_balance``; the last is listed
            anyway for rings where rows hold several documents.
        progress: whether to show a bar; by default on a terminal.

    Where nothing fits, plans have losses in parts (``loss_chunks``), or saved values in host memory (``offload``), and
    the report says so. Saved values are there, too, where steps are faster so than with what else makes them fit.

    Raises:
        CompileError: QN1xx if the model cannot be captured, QN108 for a backend that there is not, QN2xx for the plan;
            QN212 if nothing fits the cluster's memory, with the smallest change after which something does; QN216 for
            an objective that there is not, tokens or a price that are not above 0, a reserve that is no share, or a
            decision that cannot be listed.
    """
    alternatives = listed(among)
    question, goal = Question(objective, SearchEffort(work, seconds)), Goal(tokens, price)
    fixed = read_plan(plan).changed({"expect": expect}, keep_open=True)
    planner = _planner(model, cluster, batch, loss_fn, fixed, rules, goal, backend, reserve)
    tokens_in = planner.workload.tokens

    def of_length(length: int) -> Planner:
        expected = expecting_documents(fixed, planner.pinned.expect.documents)
        longer = with_length(batch, length)
        with one_thread(), new_garbage_only():
            return _planner(model, cluster, longer, loss_fn, expected, rules, goal, backend, reserve)

    with bar("layouts settled", progress) as shown:
        return plan_model(
            planner,
            question,
            top_k=top_k,
            progress=shown,
            of_length=of_length if tokens_in else None,
            among=_with_rings_in_order(planner, alternatives),
        )


@one_thread()
@new_garbage_only()
def estimate(
    model: nn.Module,
    cluster: Cluster,
    batch: Any,
    plan: Given,
    *,
    loss_fn: LossFn | None = None,
    rules: Sequence[Rule] = (),
    tokens: float | None = None,
    price: float | None = None,
    backend: str = "eager",
) -> Estimate:
    """Predict step time, memory per rank, communication and bubble of one plan, which must have a mesh; with its tokens
    a second, model FLOP utilisation, energy, and with ``tokens`` and ``price`` (as for :func:`quintnet.plan`) what
    training takes and costs. ``backend``: as for :func:`quintnet.plan`.

    Raises:
        CompileError: as :func:`quintnet.plan`; QN207 if the plan has no mesh, QN201 if the mesh names axes in an
            unusual order and the cluster has several kinds of nodes, QN301 if it does not fit the cluster.
    """
    chosen, goal = read_plan(plan), Goal(tokens, price)
    if not chosen.mesh:
        raise CompileError("QN207", "the plan has no mesh", fix="give one, or ask quintnet.plan for plans")
    mesh = Mesh(**chosen.mesh)
    check_plan(chosen, mesh)
    if mesh.size > cluster.size:
        raise CompileError(
            "QN301", f"{mesh} has {mesh.size} ranks, and the cluster {cluster.size} devices",
            fix=f"use a cluster of {-(-mesh.size // cluster.gpus_per_node)} nodes",
        )  # fmt: skip
    axes = [axis for axis, size in mesh.axes if size > 1]
    if len(cluster.parts) > 1 and axes != (usual := [axis for axis in AXES if mesh[axis] > 1]):
        raise CompileError(
            "QN201", f"{mesh} on several kinds of nodes: estimates number ranks with {usual[0]} outermost",
            fix=f"name the axes in the order {', '.join(usual)}; or compile, and ask simulate(cluster)",
        )  # fmt: skip
    return _planner(model, cluster, batch, loss_fn, chosen, rules, goal, backend).estimate()


def _planner(
    model: nn.Module, cluster: Cluster, batch: Any, loss_fn: LossFn | None, pinned: Plan, rules: Sequence[Rule],
    goal: Goal, backend: str, reserve: float = RESERVED_SHARE,
) -> Planner:  # fmt: skip
    if not isinstance(cluster, Cluster):
        raise CompileError(
            "QN201", f"a {type(cluster).__name__} is not a cluster", fix='pass quintnet.Cluster("h100", nodes=8)'
        )
    refuse_wrapped(model, loss_fn)
    check_engine(backend)
    decided = "virtual_stages" in pinned.model_fields_set
    check_schedule(pinned.schedule, pinned.virtual_stages if decided else None)
    check_feature_fields(pinned, searched=True)
    batch = plain_batch(batch)
    traced = partial(capture, model, batch, loss_fn, once=not pinned.parameters)  # a plan may single blocks out
    try:
        captured = traced()
    except RowsElsewhere as elsewhere:
        captured = traced(
            form=BatchForm.of_batch(batch, FlatBatch.flatten(batch, {elsewhere.structure: elsewhere.leaf}).rows)
        )
    book = {**RULES, **registered_rules(), **user_rules(rules)}
    unknown = "memory" if rules or pinned.unknown_ops == "replicate" else "error"
    flat = FlatBatch.flatten(batch)
    machine = PricedCluster(cluster, unknown, reserve, ENGINES[backend].replayed)
    tokens = tokens_of(flat.leaves)
    return Planner.from_captured(
        captured, captured.form.rows_in(batch), machine, pinned, book, tokens, goal, flat.leaves
    )


def _with_rings_in_order(planner: Planner, among: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Beside each of ``among``, rings without ``context_load_balance``, where rows are expected to hold several
    documents and the plan leaves it open: exchanged runs even out work, but put documents on ranks that are far apart,
    so that keys travel all around a ring which would end early."""
    pinned, first = planner.pinned, list(among) or [{}]
    decided = pinned.model_fields_set.union(*first)
    ring = "context" not in decided or pinned.context == "ring"
    if "context_load_balance" in decided or not ring or not planner.splits_documents:
        return list(among)
    ways = {"context_load_balance": True}, {"context_load_balance": False, "context": "ring"}
    return [{**decisions, **way} for decisions in first for way in ways]
