"""A search for plans, and the further questions that its report answers by searching again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from types import MappingProxyType
from typing import Any, get_args

from ..core.errors import CompileError
from ..cost_models.cluster import Cluster
from ..ir.plan import Plan, read_plan
from .compare import Alternative, Versus
from .curves import SWEPT, ParetoFront, ScalingCurve, ScalingPoint, Sweep, SweepPoint, undominated
from .estimate import Estimate
from .host_memory import OFFLOADS, HostMemory, possible
from .layouts import Layout
from .planning import Planner, Pricing
from .report import PlanReport
from .search import Objective, SearchEffort, SearchResult

Progress = Callable[[int, int], None]
MEMORY_SLACK = 0.25  # plans for little memory are the fastest that take at most so much more than the least
NEARLY = 0.03  # prices are no more exact: what is slower by no more, and simpler, is said, too
STEPS = (0.2, 0.1, 0.03)  # by how much the next point of a front takes less memory; the smaller where nothing else fits
LISTED = (
    "precision", "loss_chunks", "async_tp", "offload", "reduce_dtype", "sum_dtype", "sequence_parallel",
    "reshard_after_forward", "overlap", "context_load_balance",
)  # fmt: skip
# What is tried in turn where nothing fits
RESORTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "losses are computed in 8 parts (loss_chunks)": {"loss_chunks": 8},
        "losses are computed in 64 parts (loss_chunks)": {"loss_chunks": 64},
        **{said: {"offload": offload} for offload, said in OFFLOADS.items()},
        **{
            f"losses are computed in 8 parts (loss_chunks), and {said}": {"loss_chunks": 8, "offload": offload}
            for offload, said in OFFLOADS.items()
        },
    }
)  # fmt: skip
SIZES = (0.25, 0.5, 1, 2, 4)  # of a scaling curve, times the cluster


@dataclass(frozen=True)
class Question:
    """What is to be the least, and how long to search.

    Raises:
        CompileError: QN216 for an objective that there is not.
    """

    objective: Objective = "time"
    effort: SearchEffort = SearchEffort()

    def __post_init__(self) -> None:
        if self.objective not in get_args(Objective):
            known = ", ".join(get_args(Objective))
            raise CompileError("QN216", f"there is no objective {self.objective!r}", fix=f"use one of {known}")

    def value(self, found: Estimate) -> float:
        """What is to be the least."""
        if self.objective == "memory":
            return found.claimed_bytes
        return found.seconds * (found.layout.mesh.size if self.objective == "cost" else 1)

    @property
    def shorter(self) -> SearchEffort:
        """For one of several searches."""
        return SearchEffort(self.effort.work / 2, self.effort.seconds / 2)

    def search(
        self, planner: Planner, top_k: int = 1, progress: Progress | None = None, pricing: Pricing | None = None
    ) -> SearchResult[Layout, Estimate]:
        """The best layouts. For memory: the fastest of those that take at most a quarter more than the least.

        Raises:
            CompileError: QN210 if an operator has no price.
        """
        pricing = pricing or planner.pricing()
        if self.objective != "memory":
            return planner.search(top_k, self.objective, self.effort, progress, pricing=pricing)
        until = time.monotonic() + self.effort.seconds
        least = planner.search(1, "memory", self.effort, progress, pricing=pricing)
        if not least.ranked:
            return least
        most = (1 + MEMORY_SLACK) * least.ranked[0].claimed_bytes
        effort = replace(self.effort, seconds=max(0.0, until - time.monotonic()))
        found = planner.search(top_k, "time", effort, progress, pricing=pricing, memory_bytes=most)
        if not found.ranked:  # out of time
            return least
        return found if least.complete else replace(found, ended=least.ended)


@dataclass(frozen=True)
class Questions:
    """Further questions about the model of ``planner``, whose ``best`` layout is known; ``pricing``: what else is;
    ``of_length``: a planner for rows of so many positions."""

    planner: Planner
    question: Question
    best: Estimate
    pricing: Pricing = field(repr=False)
    of_length: Callable[[int], Planner] | None = field(default=None, repr=False)

    def known(self) -> tuple[Estimate, ...]:
        """All that was priced, whether it fits or not."""
        return tuple(self.pricing.known.values())

    def why_not(self, decisions: Mapping[str, Any]) -> Versus:
        """See :meth:`.report.PlanReport.why_not`."""
        given = {**self.planner.pinned.model_dump(exclude_unset=True), **decisions}
        made = self.question.search(replace(self.planner, pinned=read_plan(given)))
        if made.ranked:
            return Versus(self.best, made.ranked[0])
        return Versus(self.best, None, _why(made, self.question.effort))

    def front(self) -> ParetoFront:
        """See :meth:`.report.PlanReport.front`."""
        planner, question, found, proven = self.planner, self.question, [self.best], True
        if question.objective != "time":
            fastest = planner.search(1, "time", question.shorter, pricing=self.pricing)
            found, proven = list(fastest.ranked), fastest.complete
        smaller = True
        while smaller:
            smaller = False
            for step in STEPS if found else ():
                limit = (1 - step) * found[-1].claimed_bytes
                made = planner.search(1, "time", question.shorter, pricing=self.pricing, memory_bytes=limit)
                proven &= made.complete
                if made.ranked:
                    found, smaller = [*found, made.ranked[0]], True
                    break
                if made.ended == "time":
                    break
        return ParetoFront(tuple(undominated([*found, self.best])), planner.machine.memory_bytes, proven)

    def scaling(self, devices: Sequence[int] | None) -> ScalingCurve:
        """See :meth:`.report.PlanReport.scaling`."""
        cluster, effort, points = self.planner.machine.cluster, self.question.shorter, []
        sizes = devices or [int(times * cluster.size) for times in SIZES if cluster.has_part(times * cluster.size)]
        for size in sizes:
            if size == cluster.size and self.question.objective == "time":
                points.append(ScalingPoint(size, self.best))
                continue
            machine = replace(self.planner.machine, cluster=cluster.sized(size))
            made = replace(self.planner, machine=machine).search(1, "time", effort)
            why = "" if made.ranked else _why(made, effort)
            points.append(ScalingPoint(size, made.ranked[0] if made.ranked else None, why))
        kinds = " and ".join(device.name for device, _ in cluster.kinds)
        return ScalingCurve(kinds, tuple(points))

    def sweep(self, argument: str, amounts: Sequence[float]) -> Sweep:
        """See :meth:`.report.PlanReport.sweep`."""
        if argument not in SWEPT:
            raise CompileError("QN216", f"{argument!r} cannot be varied", fix=f"use one of {', '.join(SWEPT)}")
        question, points = replace(self.question, effort=self.question.shorter), []
        for amount in amounts:
            number = isinstance(amount, (int, float)) and not isinstance(amount, bool) and math.isfinite(amount)
            if not number or amount <= 0 or (argument != "network" and amount != int(amount)):
                kind = "a number" if argument == "network" else "a whole number"
                raise CompileError("QN216", f"{argument}={amount!r}", fix=f"give {kind} above 0")
            try:
                made = question.search(self._varied(argument, amount))
                why = "" if made.ranked else _why(made, question.effort)
                points.append(SweepPoint(amount, made.ranked[0] if made.ranked else None, why))
            except CompileError as error:
                points.append(SweepPoint(amount, None, f"{error.code} {error.message}"))
        return Sweep(argument, tuple(points))

    def _varied(self, argument: str, amount: float) -> Planner:
        planner = self.planner
        machine, load, cluster = planner.machine, planner.workload, planner.machine.cluster
        if argument == "devices":
            return replace(planner, machine=replace(machine, cluster=cluster.sized(int(amount))))
        if argument == "network":
            other = Cluster(
                cluster.device, cluster.nodes, cluster.gpus_per_node, network_bytes_per_second=amount,
                rail=cluster.rail, oversubscription=cluster.oversubscription,
            )  # fmt: skip
            return replace(planner, machine=replace(machine, cluster=other))
        if argument == "length":
            if self.of_length is None:
                raise CompileError("QN216", "a batch without tokens has no length", fix="vary `rows`")
            return self.of_length(int(amount))
        captured, tokens = planner.folded.program.captured, load.tokens * int(amount) // load.rows
        return Planner.of(captured, int(amount), machine, planner.pinned, planner.rules, tokens, load.goal)

    def beside(self, cluster: Cluster, price: float | None) -> Versus:
        """See :meth:`.report.PlanReport.beside`."""
        planner = self.planner
        if not isinstance(cluster, Cluster):
            said = f"a {type(cluster).__name__} is not a cluster"
            raise CompileError("QN201", said, fix='pass quintnet.Cluster("h100", nodes=8)')
        machine = replace(planner.machine, cluster=cluster)
        goal = replace(planner.workload.goal, price=price)
        there = Planner.of(
            planner.folded.program.captured, planner.workload.rows, machine, planner.pinned, planner.rules,
            planner.workload.tokens, goal,
        )  # fmt: skip
        made, names = self.question.search(there), (planner.machine.name, machine.name)
        if made.ranked:
            return Versus(self.best, made.ranked[0], names=names)
        return Versus(self.best, None, _why(made, self.question.effort), names)


@dataclass(frozen=True)
class _Searched:
    """What a search with certain ``decisions`` found."""

    decisions: Mapping[str, Any]
    planner: Planner
    pricing: Pricing
    found: SearchResult[Layout, Estimate]

    @classmethod
    def of(
        cls, planner: Planner, decisions: Mapping[str, Any], question: Question, top_k: int, progress: Progress | None
    ) -> _Searched:
        here = planner.deciding(decisions) if decisions else planner
        pricing = here.pricing()
        return cls(decisions, here, pricing, question.search(here, top_k, progress, pricing))

    def alternative(self, effort: SearchEffort) -> Alternative:
        if self.found.ranked:
            return Alternative(self.decisions, self.found.ranked[0])
        return Alternative(self.decisions, None, _why(self.found, effort))


def listed(among: Mapping[str, Sequence[Any]] | None) -> list[dict[str, Any]]:
    """Every combination of the values that are listed.

    Raises:
        CompileError: QN216 for a decision that cannot be listed, or has no values.
    """
    for name, given in (among or {}).items():
        if name not in LISTED:
            raise CompileError(
                "QN216",
                f"among={{{name!r}: ...}}",
                fix=f"list values of {', '.join(LISTED)}; layouts are searched anyway",
            )
        if isinstance(given, str) or not isinstance(given, Sequence) or not given:
            raise CompileError("QN216", f"among={{{name!r}: {given!r}}}", fix="give a tuple of values")
    names = list(among or {})
    return [dict(zip(names, values, strict=True)) for values in product(*(among or {}).values())] if names else []


def plan_model(
    planner: Planner, question: Question, *, top_k: int, progress: Progress | None = None,
    of_length: Callable[[int], Planner] | None = None, among: Sequence[Mapping[str, Any]] = (),
) -> PlanReport:  # fmt: skip
    """Search, and say what came of it; if nothing fits, again with what saves memory (:data:`RESORTS`), where the plan
    leaves that open. ``of_length``: see :class:`Questions`; ``among``: see :func:`listed`; each gets a search of its
    own, and the plans are those of the best.

    Raises:
        CompileError: QN212 if nothing fits, with the smallest change that makes it fit; or if time ran out before
            anything was found.
    """
    started, notes = time.monotonic(), list[str]()
    every, alternatives = _all_searched(planner, question, top_k, progress, among)
    fitting = [one for one in every if one.found.ranked]
    first = every[0]
    if not fitting and not first.found.complete:
        message = unfinished(first.found, question.effort)
        raise CompileError("QN212", message, fix="search longer (seconds=), or pin the mesh")
    if not fitting:
        found_again = _with_a_resort(first, question, top_k, progress)
        if found_again is None:
            raise _infeasible(first.planner, first.found, question.effort)
        fitting, notes = [found_again[0]], [f"{found_again[1]}: nothing fits without"]
    best = min(fitting, key=lambda one: question.value(one.found.ranked[0]))
    weighed = HostMemory(best.planner, best.pricing, best.found, question.objective, question.effort.work)
    if (outside := weighed.better(top_k)) is not None:
        best = _Searched({**best.decisions, **outside.decisions}, outside.planner, outside.pricing, outside.found)
        notes.append(outside.note)
    decisions, planner, pricing, found = best.decisions, best.planner, best.pricing, best.found

    def longer(length: int) -> Planner:
        assert of_length is not None
        return of_length(length).deciding(decisions) if decisions else of_length(length)

    if planner.machine.unlike and "pp" not in planner.pinned.mesh:
        # so that the report can say what ranks that wait for each other would take: one stage lies on all kinds
        whole = replace(
            planner, pinned=planner.pinned.changed({"mesh": {**planner.pinned.mesh, "pp": 1}}, keep_open=True)
        )
        whole.search(1, "time", SearchEffort(question.effort.work / 4, question.effort.seconds / 4), pricing=pricing)
    if lengths := planner.pinned.documents:
        notes.append(f"rows are taken to hold documents of {min(lengths):,} to {max(lengths):,} positions")
    plans, machine = tuple(planner.complete(one) for one in found.ranked), planner.machine
    simpler = _simpler(planner, question, found.ranked[0], pricing)
    if question.objective == "memory":
        notes.append(
            f"the fastest plans that take at most {MEMORY_SLACK:.0%} more memory than the least that was found"
        )
    return PlanReport(
        machine.name, planner.folded.program.batch_size, machine.memory_bytes, machine.reserve, found, plans,
        time.monotonic() - started, Questions(planner, question, found.ranked[0], pricing, of_length and longer),
        "; ".join(notes),
        (simpler, planner.complete(simpler)) if simpler else None, alternatives,
    )  # fmt: skip


def _all_searched(
    planner: Planner, question: Question, top_k: int, progress: Progress | None, among: Sequence[Mapping[str, Any]]
) -> tuple[list[_Searched], tuple[Alternative, ...]]:
    if not among:
        return [_Searched.of(planner, {}, question, top_k, progress)], ()
    every: list[_Searched] = []
    alternatives: list[Alternative] = []
    refused: list[CompileError] = []
    for decisions in among:
        try:
            every.append(_Searched.of(planner, decisions, question, top_k, progress))
            alternatives.append(every[-1].alternative(question.effort))
        except CompileError as error:
            refused.append(error)
            alternatives.append(Alternative(decisions, None, f"{error.code} {error.message}"))
    if not every:
        raise refused[0]
    return every, tuple(alternatives)


def _with_a_resort(
    tried: _Searched, question: Question, top_k: int, progress: Progress | None
) -> tuple[_Searched, str] | None:
    """Where nothing fits: the best layouts with the first of :data:`RESORTS` with which anything does, and what it is.
    Those that are decided already are left out."""
    planner, useless = tried.planner, set(tried.planner.pinned.model_fields_set)
    rows = planner.folded.program.batch_size
    whole = Layout(1, 1, 1, 1, 1, 1, rows, "all_gather", (), "1f1b", 1, "none", 0, ("dp",))
    for said, decisions in RESORTS.items():
        if useless & decisions.keys() or not possible(decisions.get("offload", ()), planner.pinned):
            continue
        here = planner.deciding(decisions)
        pricing = here.pricing()
        if decisions.keys() == {"loss_chunks"} and pricing.build(whole) == tried.pricing.build(whole):
            useless.add("loss_chunks")  # there is no such loss
            continue
        found = question.search(here, top_k, progress, pricing)
        on_hosts = tuple(one for one in found.ranked if one.host_bytes <= here.machine.host_bytes)
        if on_hosts:
            found = replace(found, ranked=on_hosts)
            return _Searched({**tried.decisions, **decisions}, here, pricing, found), said
    return None


def _simpler(planner: Planner, question: Question, best: Estimate, pricing: Pricing) -> Estimate | None:
    """Of all that was priced, fits, and is nearly as good as ``best``, the one with the fewest parts; None where it has
    no fewer than ``best``."""
    if question.objective != "time":
        return None
    most = planner.machine.memory_bytes * (1 - planner.machine.reserve)
    near = [e for e in pricing.known.values() if e.seconds <= (1 + NEARLY) * best.seconds and e.memory_bytes <= most]
    found = min(near, key=lambda e: (e.layout.parts, e.seconds, e.layout), default=best)
    return found if found.layout.parts < best.layout.parts else None


def unfinished(found: SearchResult[Layout, Estimate], effort: SearchEffort) -> str:
    """That time ran out before anything was found."""
    seen = f"{len(found.rejected)} do not, and {found.left} were not looked at"
    return f"in {effort.seconds:.3g} s no layout was found that fits: {seen}"


def _why(found: SearchResult[Layout, Estimate], effort: SearchEffort) -> str:
    """Why nothing was found."""
    if not found.complete:
        return unfinished(found, effort)
    nearest = min(found.rejected, key=lambda one: one.lacks, default=None)
    return f"{nearest.layout}: {nearest.reason}" if nearest else "no such layout"


def _infeasible(planner: Planner, found: SearchResult[Layout, Estimate], effort: SearchEffort) -> CompileError:
    """Nothing fits: free what is pinned, one decision at a time, and then take more devices; the first change that
    another search finds a plan for is the suggestion."""
    closest = min(found.rejected, key=lambda one: one.lacks, default=None)
    message = "no layout of this model fits this cluster"
    if closest:
        message += f": {closest.reason} ({closest.layout}), and {len(found.rejected) - 1} more"
    for name, text in (
        ("recompute", "let the planner recompute (leave `recompute` open)"),
        ("microbatches", "use smaller microbatches (leave `microbatches` open)"),
        ("mesh", "leave `mesh` open"),
    ):
        if name in planner.pinned.model_fields_set:
            kept = planner.pinned.model_dump(include=planner.pinned.model_fields_set - {name})
            freed = replace(planner, pinned=Plan.model_validate(kept))
            if freed.search(1, "time", effort).ranked:
                return CompileError("QN212", message, fix=text)
    cluster = planner.machine.cluster
    for times in (2, 4, 8, 16, 32, 64):
        larger = replace(planner, machine=replace(planner.machine, cluster=cluster.sized(cluster.size * times)))
        better = larger.search(1, "time", effort)
        if better.ranked:
            return CompileError(
                "QN212", message, fix=f"use {cluster.size * times} devices: {better.ranked[0].layout} fits"
            )
    return CompileError("QN212", f"{message}; nor does any fit on up to 64 times as many of these devices")
