"""The planner as a whole: a model, a batch and a cluster in, ranked plans out."""

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
from ..cost_models.cluster import Cluster
from ..cost_models.cluster_costs import ClusterCosts, FastestCosts
from ..cost_models.collectives import bucket_bytes
from ..cost_models.roofline import Roofline
from ..ir.cost_protocol import CostModel, RankCosts
from ..ir.plan import HOSTED, Plan, precision_of
from ..ir.program import Captured
from ..ops.attention.operator import attention
from ..ops.attention.seen_keys import rows_of
from ..ops.rules.notation import Rule
from ..passes.frontend.document_ids import documents_in, expect_documents
from ..passes.frontend.lower_precision import LowerPrecision
from ..passes.frontend.normalize import Normalize
from ..passes.sharding.fold_blocks import FoldBlocks, Folded
from ..passes.sharding.split_step_end import SplitStepEnd
from ..passes.strategies.expert_axes import dispatched_bytes, expert_parameters
from ..passes.strategies.hot_experts import check_hot_experts
from ..passes.strategies.rule_book import RuleBook
from .bounds import Kept, LessSplit
from .build import Builder, device_of
from .estimate import Estimate
from .evaluate import evaluate
from .layouts import Again, Layout, Limits, divisors, layouts, slicings
from .pipeline import actions_run
from .places import Place, Slowdown, placed
from .search import Objective, SearchEffort, SearchResult, Wanted, search
from .stage_units import unit_count
from .workload import NO_GOAL, Goal, Workload

aten = torch.ops.aten
ORDERS = ("1f1b", "interleaved", "zb-h1", "zb-v")  # gpipe has the bubble of 1f1b, and holds more
AGAIN: tuple[Again, ...] = ("none", "selective", "full")  # the less is computed again, the faster
STAGES_PER_RANK = (1, 2, 3, 4, 6, 8)
ACTION = 0.002  # what it takes to run an action of a schedule, beside what it takes to compile an operator
RESERVE = 0.08
HOST = 2.5  # times the memory of a device: what a node's host has for each (3.1 in a DGX H100 or A100, 5 in GH200)
SHORTEST = 4096  # positions of a sequence that cp leaves on a rank at least: fewer keep no kernel busy


@dataclass(frozen=True)
class PricedCluster:
    """A cluster and its prices. ``unknown``: what operators without a price cost, see
    :func:`..cost_models.operators.kernel_of`; ``reserve``: the share of a device's memory that plans leave free, for
    the CUDA context, libraries and fragments; ``graphs``: whether kernels are replayed as CUDA graphs.

    Raises:
        CompileError: QN216 for a reserve that is no share.
    """

    cluster: Cluster
    unknown: str = "error"
    reserve: float = RESERVE
    graphs: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.reserve < 1:
            raise CompileError("QN216", f"reserve={self.reserve}", fix="give a share of memory, 0 or more and below 1")

    @property
    def name(self) -> str:
        return self.cluster.name

    @property
    def memory_bytes(self) -> float:
        """Of the largest device."""
        return max(device.memory_bytes for device, _ in self.cluster.kinds)

    @property
    def host_bytes(self) -> float:
        """Of a node's memory, for each of its devices."""
        return HOST * self.memory_bytes

    @cached_property
    def costs(self) -> ClusterCosts:
        return ClusterCosts(self.cluster, self.unknown, self.graphs)

    @property
    def prices(self) -> CostModel:
        """By which splits of operators are chosen: of the slowest kind, as all ranks run the same program."""
        slowest = min((device for device, _ in self.cluster.kinds), key=lambda one: one.flops_per_second("bf16"))
        return Roofline(slowest, self.unknown)

    @cached_property
    def fastest(self) -> FastestCosts:
        """What nothing undercuts, whichever devices it lies on."""
        return FastestCosts.of_kinds(self.cluster, self.unknown, self.graphs)

    @property
    def unlike(self) -> bool:
        """Whether places of a pipeline may lie on unlike nodes."""
        return len(self.cluster.parts) > 1

    def places(self, build: Builder, layout: Layout) -> list[Place]:
        """What each place of the layout's pipeline lies on, with the model as it runs there.

        Raises:
            CompileError: whatever the compiler says of the layout.
        """
        if not self.unlike:
            return [Place(build(layout), self.costs)] * layout.pp
        found = [self.costs.at(layout.mesh, place) for place in range(layout.pp)]
        return [placed(build, layout, one, self.memory_bytes, 1 - self.reserve) for one in found]


@dataclass(frozen=True)
class Pricing:
    """Estimates of layouts, each made once. An error is raised again each time."""

    build: Builder
    machine: PricedCluster
    workload: Workload
    known: dict[tuple[Layout, tuple[str, ...]], Estimate] = field(default_factory=dict)
    run: set[Hashable] = field(default_factory=set)

    def __call__(self, layout: Layout, begins: tuple[str, ...] = ()) -> Estimate:
        """
        Raises:
            CompileError: whatever the compiler says of the layout; as :func:`.evaluate.evaluate`.
        """
        if (layout, begins) not in self.known:
            places = self.machine.places(self.build, layout)
            actions = actions_run(layout.schedule, layout.pp, layout.microbatches, layout.virtual_stages)
            self.build.work += ACTION * actions if self._runs(layout) else 0.0
            plan = self.build.plan
            found = evaluate(places, layout, begins, plan.bucket_mib * 2**20, offload=plan.offload)
            guessed = tuple(sorted(self.build.guessed))
            self.known[layout, begins] = replace(found, guessed=guessed, workload=self.workload)
        return self.known[layout, begins]

    def _runs(self, layout: Layout) -> bool:
        """Whether the layout's pipeline has not been run for one that stores parameters otherwise."""
        sliced = (layout.zero, layout.zero_axes, layout.ep) if layout.zero >= 2 else ()
        plain = replace(layout, zero=0, zero_axes=(), dp=layout.dp * layout.ep, ep=1)
        new = (plain, sliced) not in self.run
        self.run.add((plain, sliced))
        return new


@dataclass(frozen=True)
class Planner:
    """A model, captured and folded, on a machine. ``pinned``: decisions that are not the planner's any more;
    ``workload``: what a step does."""

    folded: Folded
    machine: PricedCluster
    pinned: Plan
    rules: Mapping[Any, Rule]
    workload: Workload

    @classmethod
    def of(
        cls, captured: Captured, batch_size: int, machine: PricedCluster, pinned: Plan, rules: Mapping[Any, Rule],
        tokens: int = 0, goal: Goal = NO_GOAL, batch: Sequence[Any] = (),
    ) -> Planner:  # fmt: skip
        """Fix the batch size, of so many tokens, and fold repeated blocks. ``batch``: the leaves of one, which has the
        documents to expect where the plan does not say."""
        gpu = machine.cluster.gpu
        normal = Normalize(batch_size, device_of(gpu), gpu, documents=pinned.documents)(captured)
        if "documents" not in pinned.model_fields_set and (documents := documents_in(normal, batch)):
            pinned = pinned.changed({"documents": documents}, keep_open=True)
            expect_documents(normal.graph, documents)
        whole = SplitStepEnd(RuleBook(rules, pinned.unknown_ops))(normal)
        program = LowerPrecision(precision_of(pinned))(whole)
        names = [leaf.name for leaf in program.leaves.values() if leaf.kind == "parameter"]
        check_hot_experts(program.graph, pinned.hot_experts)
        patterns = *pinned.parameters, *pinned.hot_experts
        marks = {name: tuple(p for p in patterns if fnmatch.fnmatchcase(name, p)) for name in names}
        folded = FoldBlocks(marks)(program)
        kinds = [(part.device, part.count) for part in machine.cluster.parts]
        return cls(folded, machine, pinned, rules, Workload.of(folded, tokens, kinds, goal))

    def deciding(self, decisions: Mapping[str, Any]) -> Planner:
        """The same model on the same machine, with these decisions, too.

        Raises:
            CompileError: QN207 for a value that a plan cannot have; whatever the compiler says of the precision.
        """
        pinned, load = self.pinned.changed(decisions, keep_open=True), self.workload
        captured = self.folded.program.captured
        return Planner.of(captured, load.rows, self.machine, pinned, self.rules, load.tokens, load.goal)

    def limits(self, objective: Objective = "time") -> Limits:
        """The space: what is pinned has one choice, the rest what divides. Where cost counts, fewer nodes may do, of
        one kind."""
        devices, batch, pinned = self.machine.cluster.size, self.folded.program.batch_size, self.pinned
        given, cluster, again = pinned.model_fields_set, self.machine.cluster, pinned.recompute
        fewer = objective == "cost" and not self.machine.unlike
        nodes = divisors(cluster.nodes) if fewer else (cluster.nodes,)
        ways = {
            "tp": divisors(self.machine.cluster.gpus_per_node),
            "cp": self._context_ways(),
            "ep": self._expert_ways(),
            "pp": divisors(devices),
            "dp": divisors(devices),
        }
        if not pinned.mesh.keys() <= ways.keys():
            other = ", ".join(pinned.mesh.keys() - ways.keys())
            raise CompileError("QN201", f"the planner does not search over {other}", fix="compile on a mesh instead")
        if pinned.batch_statistics == "microbatch":
            raise CompileError(
                "QN201",
                'batch_statistics="microbatch" makes results depend on the layout, and the planner compares layouts of '
                "one result",
                fix="compile on a mesh instead",
            )
        if pinned.mesh:
            ways = {axis: (pinned.mesh[axis],) if axis in pinned.mesh else found for axis, found in ways.items()}
        kept = self.machine.unlike or pinned.mesh.keys() & {"dp", "ep"} or ways["ep"] != (1,)
        stored = HOSTED if "parameters" in pinned.offload else (0, 1, 2, 3)
        spread = (("dp",),) if len(ways["ep"]) > 1 and not pinned.mesh else ()
        return Limits(
            devices=tuple(cluster.size // cluster.nodes * n for n in nodes) if fewer else (cluster.size,),
            batch=batch,
            ways=ways,
            contexts=(pinned.context,) if "context" in given else ("all_gather", "ulysses", "ring"),
            experts=(pinned.experts,) if "experts" in given else ((), *spread),
            schedules=(pinned.schedule,) if "schedule" in given else ORDERS,
            virtual_stages=(pinned.virtual_stages,) if "virtual_stages" in given else STAGES_PER_RANK,
            zero=(pinned.zero,) if "zero" in given else stored,
            zero_axes=pinned.zero_axes if "zero_axes" in given else None,
            recompute=(again,) if "recompute" in given and again != "auto" else AGAIN,
            microbatches=(pinned.microbatches,) if "microbatches" in given else divisors(batch),
            units=unit_count(self.folded),
            node=0 if kept else cluster.gpus_per_node,
        )

    @property
    def splits_documents(self) -> bool:
        """Whether a layout may split rows that hold several documents over ranks."""
        most = max(self._context_ways())
        split = self.pinned.mesh.get("cp", 1 if self.pinned.mesh else most) > 1
        several = (len(ends) > 1 for ends in rows_of(self.pinned.documents, max(self._lengths, default=1)))
        return split and most > 1 and any(several)

    @cached_property
    def _lengths(self) -> list[int]:
        """Of sequences that attend to themselves."""
        targets = (attention, aten.scaled_dot_product_attention.default)
        nodes = [node for node in self.folded.program.graph.nodes if node.op == "call_function"]
        return [values(node)[0].shape[-2] for node in nodes if node.target in targets]

    def _context_ways(self) -> tuple[int, ...]:
        """Sizes that divide every sequence that attends to itself."""
        if not self._lengths:
            return (1,)
        most = max(1, min(self._lengths) // SHORTEST)
        every = divisors(self.machine.cluster.size)
        return tuple(n for n in every if n <= most and all(size % n == 0 for size in self._lengths))

    def _expert_ways(self) -> tuple[int, ...]:
        found = expert_parameters(self.folded.program.graph)
        if not found:
            return (1,)
        counts = {values(node)[0].shape[0] for node in found}
        return tuple(n for n in divisors(self.machine.cluster.size) if all(count % n == 0 for count in counts))

    def builder(self) -> Builder:
        return Builder(self.folded, self.pinned, self.rules, self.machine.prices, self.machine.costs)

    def pricing(self) -> Pricing:
        """
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
        """The best layouts of those that take at most ``memory_bytes``, and leave the reserve. ``pricing``: of an
        earlier search, with what is known from there.

        Raises:
            CompileError: QN210 if an operator has no price.
        """
        price = pricing or self.pricing()
        build, before = price.build, price.build.work
        memory = min(memory_bytes, self.machine.memory_bytes * (1 - self.machine.reserve))
        limits = self.limits(objective)
        bounds = self.bounds(build, limits, memory)

        def best(layout: Layout) -> Estimate:
            first, *others = slicings(layout, limits)
            found = [price(first)]
            more = found[0].claimed_bytes - bounds.bytes(first)  # than its state, however that is sliced
            found += [price(one) for one in others if objective == "memory" or bounds.bytes(one) + more <= memory]
            fitting = [one for one in found if one.claimed_bytes <= memory] if objective != "memory" else []
            return min(fitting, key=lambda one: one.seconds) if fitting else min(found, key=lambda e: e.claimed_bytes)

        def useful(layout: Layout) -> tuple[Layout, Estimate]:
            for sooner in faster(layout, limits) if objective != "memory" else ():
                if bounds.bytes(sooner) <= memory and best(sooner).claimed_bytes <= memory:
                    return useful(sooner)
            return layout, best(layout)

        return search(
            layouts(limits),
            useful,
            bounds,
            Wanted(
                top_k, objective, memory, time.monotonic() + effort.seconds,
                lambda layout: layout.mesh.size, effort.work, effort.patience, lambda: build.work - before,
            ),
            progress or (lambda done, total: None),
        )  # fmt: skip

    def bounds(self, build: Builder, limits: Limits, memory: float) -> LessSplit:
        """What layouts cost at least, of which each may slice its parameters as fits in ``memory``."""
        machine, program = self.machine, self.folded.program
        costs: RankCosts = machine.fastest if machine.unlike else machine.costs
        slower = Slowdown(build, machine.cluster, machine.fastest) if machine.unlike else None
        experts = expert_parameters(program.graph)
        bounds = LessSplit(
            slower.least if slower else build, costs, self.parameter_bytes(),
            dispatched_bytes(program.graph, self.folded.repeats), program.batch_size, slower,
            self.parameter_bytes(experts),
            lambda layout: [one for one in slicings(layout, limits) if bounds.bytes(one) <= memory] or [layout],
            build.learned, kept=Kept.on_devices(self.pinned.offload),
        )  # fmt: skip
        return bounds

    def parameter_bytes(self, some: Container[fx.Node] | None = None) -> int:
        """Of all parameters, or of ``some``, as ranks hold them."""
        program, repeats = self.folded.program, self.folded.repeats
        leaves = program.leaves.items()
        kept = {n: found for n, found in leaves if found.kind == "parameter" and (some is None or n in some)}
        held = {n: (found.held or value(n).dtype).itemsize for n, found in kept.items()}
        return sum(value(n).numel() * size * repeats.get(n, 1) for n, size in held.items())

    def complete(self, found: Estimate) -> Plan:
        """The document of an estimate: its layout, where it cuts the model, and how gradients travel."""
        plan = found.layout.decided(self.pinned).changed({"stages": found.begins})
        if "activations" not in plan.offload:
            plan = plan.model_copy(update={"offload_folder": None})
        given = "bucket_mib" in self.pinned.model_fields_set
        return plan if given else plan.changed({"bucket_mib": self._bucket_mib(found)})

    def _bucket_mib(self, found: Estimate) -> float:
        """Where most parameters' gradients are added up: over ranks that have other rows, or other positions."""
        layout = found.layout
        ranks = layout.mesh.peers(0, [axis.name for axis in SHARDED if axis.role in ("data", "context")])
        if len(ranks) == 1:
            return self.pinned.bucket_mib
        name, costs = "reduce_scatter" if layout.zero else "all_reduce", self.machine.costs.at(layout.mesh, 0)
        most = max(one.settled for one in found.memory)
        return bucket_bytes(lambda size: costs.group_seconds(name, size, ranks), most) / 2**20

    def estimate(self) -> Estimate:
        """What the pinned plan costs.

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
    """Layouts that do the same with less work and more memory."""
    for less in AGAIN[: AGAIN.index(layout.recompute)]:
        if less in limits.recompute:
            yield replace(layout, recompute=less)
    if layout.zero > 1 and layout.zero - 1 in limits.zero:
        yield replace(layout, zero=layout.zero - 1)
