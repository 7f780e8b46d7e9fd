"""The planner: from a model, a batch and a cluster to ranked plans."""

from __future__ import annotations

import fnmatch
import math
import time
from collections.abc import Callable, Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from ..core.annotations import value, values
from ..core.axes import AXES, SHARDED
from ..core.errors import CompileError
from ..cost_models.collectives import bucket_bytes
from ..features.answers import check_names, completed, host_state, is_allowed, parameter_patterns
from ..ir.cost_protocol import RankCosts
from ..ir.plan import Plan, expecting_documents, precision_of
from ..ir.program import Captured
from ..ops.attention.seen_keys import rows_of
from ..ops.catalog import op_spec
from ..ops.rules.notation import Rule
from ..passes.frontend.document_ids import documents_in, expect_documents
from ..passes.frontend.lower_precision import LowerPrecision
from ..passes.frontend.normalize import Normalize
from ..passes.sharding.fold_blocks import FoldBlocks, Folded
from ..passes.sharding.split_step_end import SplitStepEnd
from ..strategies.expert_axes import dispatched_bytes, expert_parameters
from ..strategies.rule_book import RuleBook
from .bounds import DeviceState, LayoutBounds
from .build import Builder, device_of
from .estimate import Estimate
from .evaluate import evaluate
from .layouts import Layout, Limits, RecomputeMode, divisors, layouts, slicings
from .pipeline import actions_run
from .places import PricedCluster, Slowdown
from .search import Objective, SearchEffort, SearchResult, Wanted, search_layouts
from .stage_units import unit_count
from .workload import NO_GOAL, Goal, Workload

aten = torch.ops.aten
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v")  # gpipe has the bubble of 1f1b, and holds more
RECOMPUTE_MODES: tuple[RecomputeMode, ...] = ("none", "selective", "full")  # the fastest first
STAGES_PER_RANK = (1, 2, 3, 4, 6, 8)
ACTION_WORK = 0.002  # work of running an action of a schedule, relative to compiling an operator
MIN_RANK_POSITIONS = 4096  # of a sequence split by cp: fewer keep no kernel busy


@dataclass(frozen=True)
class Pricing:
    """Estimates of layouts, cached. An error is raised again each time."""

    build: Builder
    machine: PricedCluster
    workload: Workload
    known: dict[tuple[Layout, tuple[str, ...]], Estimate] = field(default_factory=dict)
    run: set[Hashable] = field(default_factory=set)

    def __call__(self, layout: Layout, begins: tuple[str, ...] = ()) -> Estimate:
        """Return the estimate of a layout.

        Raises:
            CompileError: whatever the compiler says of the layout; as :func:`.evaluate.evaluate`.
        """
        if (layout, begins) not in self.known:
            places = self.machine.places(self.build, layout)
            actions = actions_run(layout.schedule, layout.pp, layout.microbatches, layout.virtual_stages)
            self.build.work += ACTION_WORK * actions if self._is_new_pipeline(layout) else 0.0
            plan = self.build.plan
            estimate = evaluate(places, layout, begins, plan.bucket_mib * 2**20, host=host_state(plan))
            guessed = tuple(sorted(self.build.guessed))
            self.known[layout, begins] = replace(estimate, guessed=guessed, workload=self.workload)
        return self.known[layout, begins]

    def _is_new_pipeline(self, layout: Layout) -> bool:
        """Return whether no layout that differs only in how it stores parameters has run its pipeline; record it."""
        sliced = (layout.zero, layout.zero_axes, layout.ep) if layout.zero >= 2 else ()
        plain = replace(layout, zero=0, zero_axes=(), dp=layout.dp * layout.ep, ep=1)
        is_new = (plain, sliced) not in self.run
        self.run.add((plain, sliced))
        return is_new


@dataclass(frozen=True)
class Planner:
    """A captured and folded model on a machine; ``pinned``: decisions that the user has made."""

    folded: Folded
    machine: PricedCluster
    pinned: Plan
    rules: Mapping[Any, Rule]
    workload: Workload

    @classmethod
    def from_captured(
        cls, captured: Captured, batch_size: int, machine: PricedCluster, pinned: Plan, rules: Mapping[Any, Rule],
        tokens: int = 0, goal: Goal = NO_GOAL, batch: Sequence[Any] = (),
    ) -> Planner:  # fmt: skip
        """Fix the batch size, and fold repeated blocks.

        ``tokens``: of a batch; ``batch``: the leaves of one, from which documents are read where the plan has none.
        """
        gpu = machine.cluster.gpu
        normal = Normalize(batch_size, device_of(gpu), gpu, expect=pinned.expect)(captured)
        if "documents" not in pinned.expect.model_fields_set and (documents := documents_in(normal, batch)):
            pinned = expecting_documents(pinned, documents)
            expect_documents(normal.graph, documents)
        whole = SplitStepEnd(RuleBook(rules, pinned.unknown_ops))(normal)
        program = LowerPrecision(precision_of(pinned))(whole)
        names = [leaf.name for leaf in program.leaves.values() if leaf.kind == "parameter"]
        check_names(program, pinned)
        patterns = *pinned.parameters, *parameter_patterns(pinned)
        marks = {name: tuple(p for p in patterns if fnmatch.fnmatchcase(name, p)) for name in names}
        folded = FoldBlocks(marks)(program)
        kinds = [(part.device, part.count) for part in machine.cluster.parts]
        return cls(folded, machine, pinned, rules, Workload.from_program(folded, tokens, kinds, goal))

    def deciding(self, decisions: Mapping[str, Any]) -> Planner:
        """Return a planner with further decisions.

        Raises:
            CompileError: QN207 for a value that a plan cannot have; whatever the compiler says of the precision.
        """
        pinned, load = self.pinned.changed(decisions, keep_open=True), self.workload
        captured = self.folded.program.captured
        return Planner.from_captured(captured, load.rows, self.machine, pinned, self.rules, load.tokens, load.goal)

    def limits(self, objective: Objective = "time") -> Limits:
        """Return the search space: one choice for what is pinned, and all that are possible for the rest.

        For the objective ``"cost"``, fewer nodes of a cluster of one kind may be used.
        """
        batch, cluster = self.folded.program.batch_size, self.machine.cluster
        axis_sizes, pinned = self._axis_sizes(), self.pinned
        if pinned.batch_statistics == "microbatch":
            raise CompileError(
                "QN201",
                'batch_statistics="microbatch" makes results depend on the layout, and the planner compares layouts of '
                "one result",
                fix="compile on a mesh instead",
            )
        chooses_mesh = not self.machine.unlike and not pinned.mesh.keys() & {"dp", "ep"} and axis_sizes["ep"] == (1,)
        expert_axes: tuple[tuple[str, ...], ...] = ((),)
        if len(axis_sizes["ep"]) > 1 and not pinned.mesh:
            expert_axes = ((), ("dp",))
        choices = Limits(
            devices=(cluster.size,),
            batch=batch,
            axis_sizes=axis_sizes,
            contexts=("all_gather", "ulysses", "ring"),
            experts=expert_axes,
            schedules=SCHEDULES,
            virtual_stages=STAGES_PER_RANK,
            zero=tuple(zero for zero in (0, 1, 2, 3) if is_allowed(pinned.changed({"zero": zero}, keep_open=True))),
            zero_axes=pinned.zero_axes if "zero_axes" in pinned.model_fields_set else None,
            recompute=RECOMPUTE_MODES,
            microbatches=divisors(batch),
            units=unit_count(self.folded),
            node=cluster.gpus_per_node if chooses_mesh else 0,
        )
        if objective == "cost" and not self.machine.unlike:
            devices = tuple(cluster.size // cluster.nodes * nodes for nodes in divisors(cluster.nodes))
            choices = replace(choices, devices=devices)
        return replace(choices, **self._pinned_choices())

    def _pinned_choices(self) -> dict[str, Any]:
        """Return the only choice of each field of the search space that is pinned."""
        fields = {
            "context": "contexts", "experts": "experts", "schedule": "schedules", "virtual_stages": "virtual_stages",
            "zero": "zero", "microbatches": "microbatches", "recompute": "recompute",
        }  # fmt: skip
        decided = {name: getattr(self.pinned, name) for name in fields if name in self.pinned.model_fields_set}
        if decided.get("recompute") == "auto":
            del decided["recompute"]
        return {fields[name]: (decision,) for name, decision in decided.items()}

    def _axis_sizes(self) -> dict[str, tuple[int, ...]]:
        """Return the sizes that each axis may have.

        Raises:
            CompileError: QN201 for a pinned axis that the planner does not search over.
        """
        devices, mesh = self.machine.cluster.size, self.pinned.mesh
        sizes = {
            "tp": divisors(self.machine.cluster.gpus_per_node),
            "cp": self._context_sizes(),
            "ep": self._expert_sizes(),
            "pp": divisors(devices),
            "dp": divisors(devices),
        }
        if not mesh.keys() <= sizes.keys():
            axes = ", ".join(mesh.keys() - sizes.keys())
            raise CompileError("QN201", f"the planner does not search over {axes}", fix="compile on a mesh instead")
        return {axis: (mesh[axis],) if axis in mesh else choices for axis, choices in sizes.items()}

    @property
    def splits_documents(self) -> bool:
        """Return whether a layout may split rows that hold several documents over ranks."""
        most = max(self._context_sizes())
        split = self.pinned.mesh.get("cp", 1 if self.pinned.mesh else most) > 1
        several = (len(ends) > 1 for ends in rows_of(self.pinned.expect.documents, max(self._lengths, default=1)))
        return split and most > 1 and any(several)

    @cached_property
    def _lengths(self) -> list[int]:
        """Return the lengths of sequences that attend to themselves."""
        nodes = self.folded.program.graph.nodes
        kinds = ((node, op_spec(node).attention) for node in nodes)
        return [values(node)[0].shape[-2] for node, kind in kinds if kind is not None and kind.of_models]

    def _context_sizes(self) -> tuple[int, ...]:
        """Return the sizes of cp that divide every sequence that attends to itself."""
        if not self._lengths:
            return (1,)
        most = max(1, min(self._lengths) // MIN_RANK_POSITIONS)
        sizes = divisors(self.machine.cluster.size)
        return tuple(n for n in sizes if n <= most and all(length % n == 0 for length in self._lengths))

    def _expert_sizes(self) -> tuple[int, ...]:
        nodes = expert_parameters(self.folded.program.graph)
        if not nodes:
            return (1,)
        counts = {values(node)[0].shape[0] for node in nodes}
        return tuple(n for n in divisors(self.machine.cluster.size) if all(count % n == 0 for count in counts))

    def builder(self) -> Builder:
        return Builder(self.folded, self.pinned, self.rules, self.machine.prices, self.machine.costs)

    def pricing(self) -> Pricing:
        """Return empty estimates, after checking the prices.

        Raises:
            CompileError: QN210 if an operator has no price.
        """
        build = self.builder()
        build.check_prices()
        return Pricing(build, self.machine, self.workload)

    def search(
        self,
        top_k: int,
        objective: Objective,
        effort: SearchEffort,
        progress: Callable[[int, int], None] | None = None,
        *,
        pricing: Pricing | None = None,
        memory_bytes: float = math.inf,
    ) -> SearchResult[Layout, Estimate]:
        """Return the best layouts that take at most ``memory_bytes`` and leave the reserve.

        ``pricing``: the estimates of an earlier search, which are reused and added to.

        Raises:
            CompileError: QN210 if an operator has no price.
        """
        price = pricing or self.pricing()
        build, work_before = price.build, price.build.work
        memory = min(memory_bytes, self.machine.memory_bytes * (1 - self.machine.reserve))
        limits = self.limits(objective)
        bounds = self.bounds(build, limits, memory)

        def best(layout: Layout) -> Estimate:
            first, *others = slicings(layout, limits)
            estimates = [price(first)]
            excess = estimates[0].claimed_bytes - bounds.bytes(first)  # however its state is sliced
            for other in others:
                if objective == "memory" or bounds.bytes(other) + excess <= memory:
                    estimates.append(price(other))
            fitting = [estimate for estimate in estimates if estimate.claimed_bytes <= memory]
            if fitting and objective != "memory":
                return min(fitting, key=lambda estimate: estimate.seconds)
            return min(estimates, key=lambda estimate: estimate.claimed_bytes)

        def fastest_variant(layout: Layout) -> tuple[Layout, Estimate]:
            for variant in faster(layout, limits) if objective != "memory" else ():
                if bounds.bytes(variant) <= memory and best(variant).claimed_bytes <= memory:
                    return fastest_variant(variant)
            return layout, best(layout)

        return search_layouts(
            layouts(limits),
            fastest_variant,
            bounds,
            Wanted(
                top_k, objective, memory, time.monotonic() + effort.seconds,
                lambda layout: layout.mesh.size, effort.work, effort.patience, lambda: build.work - work_before,
            ),
            progress or (lambda done, total: None),
        )  # fmt: skip

    def bounds(self, build: Builder, limits: Limits, memory: float) -> LayoutBounds:
        """Return lower bounds of layouts; each may slice its parameters in any way that fits into ``memory``."""
        machine, program = self.machine, self.folded.program
        costs: RankCosts = machine.fastest if machine.unlike else machine.costs
        slowdown = Slowdown(build, machine.cluster, machine.fastest) if machine.unlike else None
        experts = expert_parameters(program.graph)
        bounds = LayoutBounds(
            slowdown.fastest_units if slowdown else build, costs, self.parameter_bytes(),
            dispatched_bytes(program.graph, self.folded.repeats), program.batch_size, slowdown,
            self.parameter_bytes(experts),
            lambda layout: [other for other in slicings(layout, limits) if bounds.bytes(other) <= memory] or [layout],
            build.learned, device_state=DeviceState.excluding(host_state(self.pinned)),
        )  # fmt: skip
        return bounds

    def parameter_bytes(self, nodes: Container[fx.Node] | None = None) -> int:
        """Return bytes of all parameters, or of those of ``nodes``, as ranks hold them."""
        total = 0
        for node, spec in self.folded.program.leaves.items():
            if spec.kind == "parameter" and (nodes is None or node in nodes):
                itemsize = (spec.held or value(node).dtype).itemsize
                total += value(node).numel() * itemsize * self.folded.repeats.get(node, 1)
        return total

    def complete(self, estimate: Estimate) -> Plan:
        """Return the plan of an estimate: its layout, where stages begin, and the size of gradient buckets."""
        plan = completed(estimate.layout.decided(self.pinned).changed({"stages": estimate.begins}))
        is_decided = "bucket_mib" in self.pinned.model_fields_set
        return plan if is_decided else plan.changed({"bucket_mib": self._bucket_mib(estimate)})

    def _bucket_mib(self, estimate: Estimate) -> float:
        """Return the bucket size for the ranks over which most gradients are reduced: data and context ranks."""
        layout = estimate.layout
        ranks = layout.mesh.peers(0, [axis.name for axis in SHARDED if axis.role in ("data", "context")])
        if len(ranks) == 1:
            return self.pinned.bucket_mib
        name, costs = "reduce_scatter" if layout.zero else "all_reduce", self.machine.costs.at(layout.mesh, 0)
        most = max(stage.settled for stage in estimate.memory)
        return bucket_bytes(lambda size: costs.group_seconds(name, size, ranks), most) / 2**20

    def estimate(self) -> Estimate:
        """Return the cost of the pinned plan.

        Raises:
            CompileError: QN210 with every operator that has no price; as :func:`.evaluate.evaluate`.
        """
        plan, sizes = self.pinned, {axis: self.pinned.mesh.get(axis, 1) for axis in AXES}
        if plan.recompute == "auto":
            raise CompileError(
                "QN207", "an estimate is of one of none, selective and full recomputing, and the plan leaves it open",
                fix="decide `recompute`; or compile, and ask simulate()",
            )  # fmt: skip
        rows = self.folded.program.batch_size // (sizes["dp"] * sizes["ep"] * plan.microbatches)
        layout = Layout(
            **sizes, microbatches=plan.microbatches, rows=rows, context=plan.context, experts=plan.experts,
            schedule=plan.schedule, virtual_stages=plan.virtual_stages, recompute=plan.recompute, zero=plan.zero,
            zero_axes=plan.zero_axes,
        )  # fmt: skip
        return self.pricing()(layout, plan.stages)


def faster(layout: Layout, limits: Limits) -> Iterator[Layout]:
    """Yield layouts that do the same with less work and more memory."""
    for mode in RECOMPUTE_MODES[: RECOMPUTE_MODES.index(layout.recompute)]:
        if mode in limits.recompute:
            yield replace(layout, recompute=mode)
    if layout.zero > 1 and layout.zero - 1 in limits.zero:
        yield replace(layout, zero=layout.zero - 1)
