"""Search for plans, and answer the further questions of its report by searching again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from ..core.errors import CompileError
from ..cost_models.cluster import Cluster
from ..features.answers import is_allowed, memory_savers, savers_together
from ..ir.plan import Plan, read_plan
from .compare import Alternative, Versus
from .curves import SWEPT, ParetoFront, ScalingCurve, ScalingPoint, Sweep, SweepPoint, undominated
from .estimate import Estimate
from .host_memory import HostMemory
from .layouts import Layout
from .planning import Planner, Pricing
from .report import PlanReport
from .search import Objective, SearchEffort, SearchResult

Progress = Callable[[int, int], None]
MEMORY_SLACK = 0.25  # plans for little memory are the fastest that take at most so much more than the least
SIMPLER_SLOWDOWN = 0.03  # a simpler plan is reported if it is slower by no more: prices are no more exact
FRONT_MEMORY_STEPS = (0.2, 0.1, 0.03)  # shares of memory that the next point of a front saves, the first that fits
SCALING_FACTORS = (0.25, 0.5, 1, 2, 4)  # sizes of a scaling curve, as multiples of the cluster


@dataclass(frozen=True)
class Question:
    """An objective to minimise, and how long to search.

    Raises:
        CompileError: QN216 for an objective that there is not.
    """

    objective: Objective = "time"
    effort: SearchEffort = SearchEffort()

    def __post_init__(self) -> None:
        if self.objective not in get_args(Objective):
            objectives = ", ".join(get_args(Objective))
            raise CompileError("QN216", f"there is no objective {self.objective!r}", fix=f"use one of {objectives}")

    def value(self, estimate: Estimate) -> float:
        """Return what is minimised."""
        if self.objective == "memory":
            return estimate.claimed_bytes
        return estimate.seconds * (estimate.layout.mesh.size if self.objective == "cost" else 1)

    @property
    def shorter(self) -> SearchEffort:
        """Return the effort of one of several searches."""
        return SearchEffort(self.effort.work / 2, self.effort.seconds / 2)

    def search(
        self, planner: Planner, top_k: int = 1, progress: Progress | None = None, pricing: Pricing | None = None
    ) -> SearchResult[Layout, Estimate]:
        """Return the best layouts. For memory: the fastest of those that take at most a quarter more than the least.

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
        fastest = planner.search(top_k, "time", effort, progress, pricing=pricing, memory_bytes=most)
        if not fastest.ranked:  # out of time
            return least
        return fastest if least.complete else replace(fastest, ended=least.ended)


@dataclass(frozen=True)
class Questions:
    """Further questions about a model.

    Attributes:
        planner: the planner of the model.
        question: what was searched.
        best: the estimate of the best layout.
        pricing: of all layouts that were priced.
        of_length: returns a planner for rows of a number of positions.
    """

    planner: Planner
    question: Question
    best: Estimate
    pricing: Pricing = field(repr=False)
    of_length: Callable[[int], Planner] | None = field(default=None, repr=False)

    def known(self) -> tuple[Estimate, ...]:
        """Return all estimates, of layouts that do not fit too."""
        return tuple(self.pricing.known.values())

    def why_not(self, decisions: Mapping[str, Any]) -> Versus:
        """Answer :meth:`.report.PlanReport.why_not`."""
        document = {**self.planner.pinned.model_dump(exclude_unset=True), **decisions}
        result = self.question.search(replace(self.planner, pinned=read_plan(document)))
        if result.ranked:
            return Versus(self.best, result.ranked[0])
        return Versus(self.best, None, result.failure(self.question.effort))

    def front(self) -> ParetoFront:
        """Answer :meth:`.report.PlanReport.front`."""
        planner, question, points, proven = self.planner, self.question, [self.best], True
        if question.objective != "time":
            fastest = planner.search(1, "time", question.shorter, pricing=self.pricing)
            points, proven = list(fastest.ranked), fastest.complete
        smaller = True
        while smaller:
            smaller = False
            for step in FRONT_MEMORY_STEPS if points else ():
                limit = (1 - step) * points[-1].claimed_bytes
                result = planner.search(1, "time", question.shorter, pricing=self.pricing, memory_bytes=limit)
                proven &= result.complete
                if result.ranked:
                    points, smaller = [*points, result.ranked[0]], True
                    break
                if result.ended == "time":
                    break
        return ParetoFront(tuple(undominated([*points, self.best])), planner.machine.memory_bytes, proven)

    def scaling(self, devices: Sequence[int] | None) -> ScalingCurve:
        """Answer :meth:`.report.PlanReport.scaling`."""
        cluster, effort, points = self.planner.machine.cluster, self.question.shorter, []
        sizes = devices or [
            int(times * cluster.size) for times in SCALING_FACTORS if cluster.has_part(times * cluster.size)
        ]
        for size in sizes:
            if size == cluster.size and self.question.objective == "time":
                points.append(ScalingPoint(size, self.best))
                continue
            machine = replace(self.planner.machine, cluster=cluster.sized(size))
            result = replace(self.planner, machine=machine).search(1, "time", effort)
            why = "" if result.ranked else result.failure(effort)
            points.append(ScalingPoint(size, result.ranked[0] if result.ranked else None, why))
        kinds = " and ".join(device.name for device, _ in cluster.kinds)
        return ScalingCurve(kinds, tuple(points))

    def sweep(self, argument: str, amounts: Sequence[float]) -> Sweep:
        """Answer :meth:`.report.PlanReport.sweep`."""
        if argument not in SWEPT:
            raise CompileError("QN216", f"{argument!r} cannot be varied", fix=f"use one of {', '.join(SWEPT)}")
        question, points = replace(self.question, effort=self.question.shorter), []
        for amount in amounts:
            number = isinstance(amount, (int, float)) and not isinstance(amount, bool) and math.isfinite(amount)
            if not number or amount <= 0 or (argument != "network" and amount != int(amount)):
                kind = "a number" if argument == "network" else "a whole number"
                raise CompileError("QN216", f"{argument}={amount!r}", fix=f"give {kind} above 0")
            try:
                result = question.search(self._varied(argument, amount))
                why = "" if result.ranked else result.failure(question.effort)
                points.append(SweepPoint(amount, result.ranked[0] if result.ranked else None, why))
            except CompileError as error:
                points.append(SweepPoint(amount, None, f"{error.code} {error.message}"))
        return Sweep(argument, tuple(points))

    def _varied(self, argument: str, amount: float) -> Planner:
        planner = self.planner
        machine, load, cluster = planner.machine, planner.workload, planner.machine.cluster
        if argument == "devices":
            return replace(planner, machine=replace(machine, cluster=cluster.sized(int(amount))))
        if argument == "network":
            slower = Cluster(
                cluster.device, cluster.nodes, cluster.gpus_per_node, network_bytes_per_second=amount,
                rail=cluster.rail, oversubscription=cluster.oversubscription,
            )  # fmt: skip
            return replace(planner, machine=replace(machine, cluster=slower))
        if argument == "length":
            if self.of_length is None:
                raise CompileError("QN216", "a batch without tokens has no length", fix="vary `rows`")
            return self.of_length(int(amount))
        captured, tokens = planner.folded.program.captured, load.tokens * int(amount) // load.rows
        return Planner.from_captured(captured, int(amount), machine, planner.pinned, planner.rules, tokens, load.goal)

    def beside(self, cluster: Cluster, price: float | None) -> Versus:
        """Answer :meth:`.report.PlanReport.beside`."""
        planner = self.planner
        if not isinstance(cluster, Cluster):
            said = f"a {type(cluster).__name__} is not a cluster"
            raise CompileError("QN201", said, fix='pass quintnet.Cluster("h100", nodes=8)')
        machine = replace(planner.machine, cluster=cluster)
        goal = replace(planner.workload.goal, price=price)
        other = Planner.from_captured(
            planner.folded.program.captured, planner.workload.rows, machine, planner.pinned, planner.rules,
            planner.workload.tokens, goal,
        )  # fmt: skip
        result, names = self.question.search(other), (planner.machine.name, machine.name)
        if result.ranked:
            return Versus(self.best, result.ranked[0], names=names)
        return Versus(self.best, None, result.failure(self.question.effort), names)


@dataclass(frozen=True)
class _Searched:
    """A search with certain ``decisions``, and its result."""

    decisions: Mapping[str, Any]
    planner: Planner
    pricing: Pricing
    found: SearchResult[Layout, Estimate]

    @classmethod
    def with_decisions(
        cls, planner: Planner, decisions: Mapping[str, Any], question: Question, top_k: int, progress: Progress | None
    ) -> _Searched:
        """Search with further decisions."""
        decided = planner.deciding(decisions) if decisions else planner
        pricing = decided.pricing()
        return cls(decisions, decided, pricing, question.search(decided, top_k, progress, pricing))

    def alternative(self, effort: SearchEffort) -> Alternative:
        if self.found.ranked:
            return Alternative(self.decisions, self.found.ranked[0])
        return Alternative(self.decisions, None, self.found.failure(effort))


def plan_model(
    planner: Planner, question: Question, *, top_k: int, progress: Progress | None = None,
    of_length: Callable[[int], Planner] | None = None, among: Sequence[Mapping[str, Any]] = (),
) -> PlanReport:  # fmt: skip
    """Search for plans, and report them.

    If nothing fits, search again with what saves memory, where the plan leaves that open. ``of_length``: see
    :class:`Questions`; ``among``: see :func:`listed`: each combination gets its own search, and the plans are those of
    the best.

    Raises:
        CompileError: QN212 if nothing fits, with the smallest change that makes it fit; or if time ran out before
            anything was found.
    """
    started = time.monotonic()
    searches, alternatives = _search_all(planner, question, top_k, progress, among)
    fitting, notes = _fitting(searches, question, top_k, progress)
    best = min(fitting, key=lambda search: question.value(search.found.ranked[0]))
    host_memory = HostMemory(best.planner, best.pricing, best.found, question.objective, question.effort.work)
    if (outside := host_memory.better(top_k)) is not None:
        best = _Searched({**best.decisions, **outside.decisions}, outside.planner, outside.pricing, outside.found)
        notes.append(outside.note)
    decisions, planner, pricing = best.decisions, best.planner, best.pricing
    first = best.found.ranked[0]

    def longer(length: int) -> Planner:
        assert of_length is not None
        return of_length(length).deciding(decisions) if decisions else of_length(length)

    if planner.machine.unlike and "pp" not in planner.pinned.mesh:
        _price_single_stages(planner, question.effort, pricing)
    if lengths := planner.pinned.expect.documents:
        notes.append(f"rows are taken to hold documents of {min(lengths):,} to {max(lengths):,} positions")
    plans, machine = tuple(planner.complete(estimate) for estimate in best.found.ranked), planner.machine
    simpler = _simpler(planner, question, first, pricing)
    if question.objective == "memory":
        notes.append(
            f"the fastest plans that take at most {MEMORY_SLACK:.0%} more memory than the least that was found"
        )
    return PlanReport(
        machine.name, planner.folded.program.batch_size, machine.memory_bytes, machine.reserve, best.found, plans,
        time.monotonic() - started, Questions(planner, question, first, pricing, of_length and longer),
        "; ".join(notes),
        (simpler, planner.complete(simpler)) if simpler else None, alternatives,
    )  # fmt: skip


def _fitting(
    searches: Sequence[_Searched], question: Question, top_k: int, progress: Progress | None
) -> tuple[list[_Searched], list[str]]:
    """Return the searches that found a layout, or one with what saves memory and a note about that."""
    first, fitting = searches[0], [search for search in searches if search.found.ranked]
    if fitting:
        return fitting, []
    if not first.found.complete:
        message = first.found.unfinished(question.effort)
        raise CompileError("QN212", message, fix="search longer (seconds=), or pin the mesh")
    saver = _search_with_savers(first, question, top_k, progress)
    if saver is None:
        raise _infeasible(first.planner, first.found, question.effort)
    return [saver[0]], [f"{saver[1]}: nothing fits without"]


def _price_single_stages(planner: Planner, effort: SearchEffort, pricing: Pricing) -> None:
    """Price layouts of one stage on all kinds of devices, so that the report can compare ranks that wait for others."""
    mesh = {**planner.pinned.mesh, "pp": 1}
    single = replace(planner, pinned=planner.pinned.changed({"mesh": mesh}, keep_open=True))
    single.search(1, "time", SearchEffort(effort.work / 4, effort.seconds / 4), pricing=pricing)


def _search_all(
    planner: Planner, question: Question, top_k: int, progress: Progress | None, among: Sequence[Mapping[str, Any]]
) -> tuple[list[_Searched], tuple[Alternative, ...]]:
    """Search with each of the listed decisions."""
    if not among:
        return [_Searched.with_decisions(planner, {}, question, top_k, progress)], ()
    searches: list[_Searched] = []
    alternatives: list[Alternative] = []
    refused: list[CompileError] = []
    for decisions in among:
        try:
            searches.append(_Searched.with_decisions(planner, decisions, question, top_k, progress))
            alternatives.append(searches[-1].alternative(question.effort))
        except CompileError as error:
            refused.append(error)
            alternatives.append(Alternative(decisions, None, f"{error.code} {error.message}"))
    if not searches:
        raise refused[0]
    return searches, tuple(alternatives)


def _search_with_savers(
    tried: _Searched, question: Question, top_k: int, progress: Progress | None
) -> tuple[_Searched, str] | None:
    """Search with the first memory saver with which any layout fits; return its description, too.

    Those that the plan has decided are skipped.
    """
    planner, useless = tried.planner, set(tried.planner.pinned.model_fields_set)
    rows = planner.folded.program.batch_size
    whole = Layout(1, 1, 1, 1, 1, 1, rows, "all_gather", (), "1f1b", 1, "none", 0, ("dp",))
    for saver in (*memory_savers(), *savers_together()):
        decisions = saver.decisions
        if useless & decisions.keys() or not is_allowed(planner.pinned.changed(decisions, keep_open=True)):
            continue
        decided = planner.deciding(decisions)
        pricing = decided.pricing()
        if saver.in_functions and pricing.build(whole) == tried.pricing.build(whole):
            useless |= decisions.keys()  # there is nothing that it is for
            continue
        result = question.search(decided, top_k, progress, pricing)
        on_hosts = tuple(estimate for estimate in result.ranked if estimate.host_bytes <= decided.machine.host_bytes)
        if on_hosts:
            result = replace(result, ranked=on_hosts)
            return _Searched({**tried.decisions, **decisions}, decided, pricing, result), saver.text
    return None


def _simpler(planner: Planner, question: Question, best: Estimate, pricing: Pricing) -> Estimate | None:
    """Return the simplest layout that was priced, fits, and is nearly as fast as ``best``; None if that is ``best``."""
    if question.objective != "time":
        return None
    most = planner.machine.memory_bytes * (1 - planner.machine.reserve)
    near = [
        e
        for e in pricing.known.values()
        if e.seconds <= (1 + SIMPLER_SLOWDOWN) * best.seconds and e.memory_bytes <= most
    ]
    simplest = min(near, key=lambda e: (e.layout.complexity, e.seconds, e.layout), default=best)
    return simplest if simplest.layout.complexity < best.layout.complexity else None


def _infeasible(planner: Planner, result: SearchResult[Layout, Estimate], effort: SearchEffort) -> CompileError:
    """Return the error that nothing fits, with the first change with which another search finds a plan.

    Pinned decisions are freed one at a time, and then devices are added.
    """
    closest = min(result.rejected, key=lambda rejected: rejected.lacks, default=None)
    message = "no layout of this model fits this cluster"
    if closest:
        message += f": {closest.reason} ({closest.layout}), and {len(result.rejected) - 1} more"
    for name, text in (
        ("recompute", "let the planner recompute (leave `recompute` open)"),
        ("microbatches", "use smaller microbatches (leave `microbatches` open)"),
        ("mesh", "leave `mesh` open"),
    ):
        if name in planner.pinned.model_fields_set:
            decisions = planner.pinned.model_dump(include=planner.pinned.model_fields_set - {name})
            freed = replace(planner, pinned=Plan.model_validate(decisions))
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
