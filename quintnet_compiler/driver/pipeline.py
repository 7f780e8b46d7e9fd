"""The passes, in order: one list, which the compiler runs and the planner, dumps and documentation read."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, fx

from ..capture.messages import without_messages_of_torch
from ..checks.backward import check_backward
from ..checks.code import check_code
from ..checks.fake_kernels import check_fake_kernels
from ..checks.notation import check_notation
from ..checks.padding import check_padding
from ..checks.positions import check_positions
from ..checks.reductions import check_reductions
from ..checks.rewrites.early import check_early
from ..checks.rewrites.in_place import check_in_place
from ..checks.rewrites.joined import check_joined
from ..checks.rewrites.norms import check_norms
from ..checks.rewrites.overlap import check_overlap
from ..checks.rewrites.step_end import check_step_end
from ..checks.rewrites.token_dispatch import check_token_dispatch
from ..checks.slices import check_slices
from ..checks.types import check_types
from ..core.absent_gpu import CUDA, AbsentGpu
from ..core.annotations import num_bytes, values
from ..core.axes import DATA_AXES, SHARDED
from ..core.mesh import Mesh
from ..core.sharding import AxisType
from ..equivalence.dry_run import check_ranks
from ..features import FEATURES, Rewrite
from ..features.answers import check_names, expert_copies, host_state
from ..features.feature import RewriteSetting
from ..ir.cost_protocol import CostModel, RankCosts, way_seconds
from ..ir.distributed_program import DistributedProgram
from ..ir.plan import Plan, fixed_types, precision_of
from ..ir.program import Axis, Program
from ..ops.catalog import op_spec
from ..ops.rank_local import MICROBATCHES
from ..ops.rules.notation import Rule
from ..ops.rules.table import RULES
from ..passes.autodiff.differentiate import Differentiate
from ..passes.autodiff.recompute import Blocks, Recompute, dequantised
from ..passes.autodiff.recompute_budget import Budget
from ..passes.codegen.generate_ranks import GenerateRanks
from ..passes.frontend.lower_precision import LowerPrecision
from ..passes.frontend.normalize import Normalize
from ..passes.lowering.coalesce_collectives import CoalesceCollectives
from ..passes.lowering.fuse_norms import FuseNorms
from ..passes.lowering.fuse_token_dispatch import FuseTokenDispatch
from ..passes.lowering.insert_communication import InsertCommunication
from ..passes.lowering.join_slices import JoinSlices
from ..passes.lowering.sum_in_place import SumInPlace
from ..passes.overlap.gather_early import GatherEarly
from ..passes.overlap.overlap import Overlap
from ..passes.sharding.axis_view import ShardingOptions
from ..passes.sharding.choose_sharding import ChooseSharding, Solved
from ..passes.sharding.shard_parameters import ShardParameters
from ..passes.sharding.split_step_end import SplitStepEnd
from ..passes.stages.cut_stages import CutStages
from ..schedules.kinds import SCHEDULES, forward_only
from ..schedules.schedule import Op, Schedule
from ..schedules.synthesis import SYNTHESIZED
from ..strategies.expert_axes import check_experts
from ..strategies.expert_copies import expert_loads
from ..strategies.rule_book import RuleBook

T = TypeVar("T")
Pass = Callable[[Any], Any]
Check = tuple[Callable[..., None], tuple[Any, ...]]  # a function that raises, and its arguments
REWRITES = tuple(rewrite for feature in FEATURES for rewrite in feature.rewrites)


class PassRunner(Protocol):
    """A runner of passes, which applies one to a program, and runs checks."""

    def __call__(self, step: Pass, program: Any) -> Any: ...

    def check(self, prove: Callable[..., None], *given: Any) -> None: ...


@dataclass(frozen=True)
class Request:
    """Everything to compile for but the model. ``held``: by (cache, axis), the type that it has already.

    ``absent``: what ``device`` is, where this machine has none; ``lengths``: sizes of the batch that vary; ``known``: a
    program of the same kind for other sizes; ``fused``: the engine fuses; ``proven``: see :func:`check_backward`.
    """

    mesh: Mesh
    plan: Plan
    batch_size: int
    device: torch.device
    rules: Mapping[Any, Rule] = field(default_factory=lambda: RULES)
    held: Mapping[tuple[str, str], AxisType] = field(default_factory=dict)
    absent: AbsentGpu | None = None
    lengths: Mapping[str, int] = field(default_factory=dict)
    known: DistributedProgram | None = None
    fused: bool = False
    proven: set[Hashable] = field(default_factory=set)


@dataclass(frozen=True)
class PassSetting:
    """Everything that passes depend on but the program.

    ``node_seconds``: the time of a node of a rank's graph. ``differentiate``: says whether there is a backward, too.
    ``cut``: how stages are cut, where it is not for the first time. ``schedule``: set after stages are cut.
    ``repeats``: how many operators a node of a folded program stands for. ``solved``: see :class:`ChooseSharding`.
    """

    request: Request
    microbatches: int
    cost: CostModel
    node_seconds: Callable[[fx.Node], float]
    differentiate: Differentiate
    repeats: Mapping[fx.Node, int] = field(default_factory=dict)
    cut: Pass | None = None
    schedule: Schedule | None = None
    solved: Solved = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        return self.request.plan

    @property
    def batches(self) -> int:
        """Return the number of batches of a step, see :class:`..ir.program.Program`."""
        return self.microbatches if self.plan.batch_statistics == "microbatch" else 1

    @property
    def axes(self) -> tuple[Axis, ...]:
        """Return the axes that shardings nest in, without microbatches that are batches of their own."""
        return axes_of(self.request.mesh, self.microbatches // self.batches)

    @property
    def training(self) -> bool:
        """Return whether there is a backward."""
        return self.differentiate.training

    @property
    def for_rewrites(self) -> RewriteSetting:
        """Return what rewrites of features may depend on."""
        return RewriteSetting(self.plan, self.node_seconds, self.training, self.schedule)

    @property
    def stage_schedule(self) -> Schedule:
        """Return the schedule, which passes behind the cut of stages need."""
        return self.for_rewrites.stage_schedule

    @property
    def book(self) -> RuleBook:
        alone = not self.axes  # nothing is split: no rule is needed
        return RuleBook(self.request.rules, "replicate" if alone else self.plan.unknown_ops)


@dataclass(frozen=True)
class PassSpec:
    """A pass: its class, the type of program that it returns, and what it decides, in a line.

    ``make(setting, program)``: the pass, or None where a plan has no use for it. ``checks(setting, before, after)``:
    proofs of its result, beside :func:`..ir.invariants.verify_invariants`; where it did not run, ``after`` is
    ``before``. ``planned``: whether a planner runs it to price a plan; it prices slices and state without a graph.
    """

    kind: type
    result: str
    decides: str
    make: Callable[[PassSetting, Any], Pass | None]
    checks: Callable[[PassSetting, Any, Any], Iterable[Check]] = lambda setting, before, after: ()
    planned: bool = True

    @property
    def name(self) -> str:
        return self.kind.__name__


def axes_of(mesh: Mesh, microbatches: int) -> tuple[Axis, ...]:
    """Return the axes that shardings nest in: data outermost, then microbatches, context, model axes."""
    axes = [Axis(axis.name, mesh[axis.name], axis.role) for axis in SHARDED]
    axes.insert(len(DATA_AXES), Axis(MICROBATCHES, microbatches, "time"))
    return tuple(axis for axis in axes if axis.size > 1)


def expert_axes(plan: Plan) -> tuple[str, ...]:
    """The axes over which experts are spread."""
    return plan.experts or ("ep",)


def fixed(setting: PassSetting, program: Program) -> dict[tuple[str, str], AxisType]:
    """Return by (parameter, axis) the type that the plan, or another program on the same parameters, fixes."""
    names = [leaf.name for leaf in program.leaves.values() if leaf.kind == "parameter"]
    types = fixed_types(setting.plan, names, setting.request.mesh, follows=setting.cut is not None)
    return {**types, **setting.request.held}


def _planned(kind: type[T], s: PassSetting, *given: Any, **named: Any) -> T:
    """A pass from what it is ``given``, and from the plan's options of which it has fields of the same names."""
    options = {field.name for field in fields(kind)[len(given) :]} & Plan.model_fields.keys()  # type: ignore[arg-type]
    return kind(*given, **{name: getattr(s.plan, name) for name in options - named.keys()}, **named)


def _on_cuda(s: PassSetting, step: Pass) -> Pass | None:
    return step if s.request.device.type == CUDA.type else None


def _choose(s: PassSetting, program: Any) -> Pass:
    plan, similar = s.plan, s.request.known
    loads = expert_loads(program.graph, expert_copies(plan), plan.expect)
    choices = plan.sequence_parallel, plan.context, expert_axes(plan), loads
    constraints = ShardingOptions(fixed(s, program), *choices, follows=s.cut is not None)
    sharded = None if similar is None else similar.source.local.staged.sharded
    return _planned(ChooseSharding, s, s.axes, s.book, s.cost, constraints, s.repeats, sharded, s.solved)


def _store(s: PassSetting, sharded: Any) -> Pass:
    axes = s.plan.zero_axes if s.plan.zero else ()
    return _planned(ShardParameters, s, s.plan.zero, axes, fixed(s, sharded.program), expert_axes(s.plan), s.book)


def _cut(s: PassSetting) -> Pass:
    """For the schedule that the plan names; for 1F1B, or several stages per rank in turn, where it is made for stages
    that are not cut yet."""
    plan, ranks, schedule = s.plan, s.request.mesh["pp"], None
    if ranks * plan.virtual_stages > 1 and not plan.stages:
        name = plan.schedule
        if name == SYNTHESIZED:
            name = "1f1b" if plan.virtual_stages == 1 else "interleaved"
        schedule = SCHEDULES[name](ranks, s.microbatches, plan.virtual_stages)
        if not s.training:
            schedule = forward_only(schedule.placement, s.microbatches)
    return _planned(CutStages, s, ranks * plan.virtual_stages, s.cost, plan.stages, schedule)


def _recompute(s: PassSetting, program: Any) -> Pass | None:
    plan = s.plan
    blocks: Blocks = "fused" if plan.recompute == "none" and s.request.fused else plan.recompute
    asked = blocks != "none" or plan.reshard_after_forward or program.again or dequantised(program)
    if not s.training or not asked:
        return None
    gib, budget = plan.activation_memory_budget, None
    if gib is not None:
        leaving = tuple(
            leaves for rewrite in REWRITES if (leaves := rewrite.leaving(s.for_rewrites, program)) is not None
        )
        budget = Budget(int(gib * 2**30), s.stage_schedule, s.node_seconds, leaving)
    return _planned(Recompute, s, blocks, budget=budget)


def node_seconds(prices: CostModel, costs: RankCosts) -> Callable[[fx.Node], float]:
    """Return the price of a node of a rank's graph; that of collectives and copies is of what they move."""

    def seconds(node: fx.Node) -> float:
        way, collective = op_spec(node).way, op_spec(node).collective
        if way is not None and not op_spec(node).under_way:
            return way_seconds(costs, way, num_bytes(values(node)[0]))
        if collective is None:
            return costs.node_seconds(node)
        most = max(num_bytes(x) for n in (node, *node.all_input_nodes) for x in values(n) if isinstance(x, Tensor))
        passes = 2 if collective.price == "all_reduce" else 1
        return passes * prices.collective_seconds("all_gather", most, node.args[2])  # type: ignore[arg-type]

    return seconds


def _overlap(s: PassSetting, program: Any) -> Pass | None:
    if not s.plan.overlap:
        return None
    rows = s.stage_schedule.actions
    halves = {action.stage for row in rows for action in row if action.op is Op.BACKWARD_WEIGHT}
    return _planned(Overlap, s, s.node_seconds, frozenset(halves))


def _typed(s: PassSetting, old: Any, new: Any) -> list[Check]:
    return [
        (check_notation, (old.sharded.program.graph, s.request.rules)),
        (check_types, (new, s.book)),
        (check_padding, (new, s.book)),
        (check_positions, (new,)),
        (check_reductions, (new,)),
    ]


def _with_rewrites(passes: Iterable[PassSpec]) -> Iterator[PassSpec]:
    """Yield passes, each with the rewrites of features that follow it."""
    for spec in passes:
        yield spec
        for rewrite in REWRITES:
            if rewrite.follows is spec.kind:
                yield _rewrite(rewrite, spec.result)


def _rewrite(rewrite: Rewrite, result: str) -> PassSpec:
    def rewrite_for(s: PassSetting, program: Any) -> Pass | None:
        return rewrite.make(s.for_rewrites, program)

    def checks(s: PassSetting, old: Any, new: Any) -> list[Check]:
        return rewrite.checks(old, new)

    return PassSpec(rewrite.kind, result, rewrite.decides, rewrite_for, checks, rewrite.planned)


_PASSES: tuple[PassSpec, ...] = (
    PassSpec(
        Normalize, "Program", "concrete global shapes, few canonical operators, no mutation",
        lambda s, p: _planned(
            Normalize, s, s.request.batch_size // s.batches, s.request.device, s.request.absent, s.request.lengths,
            s.batches, s.microbatches // s.batches,
        ),
    ),
    PassSpec(
        SplitStepEnd, "Program", "which new values of buffers are computed after the last microbatch",
        lambda s, p: SplitStepEnd(s.book) if s.microbatches > s.batches and p.captured.changed else None,
        lambda s, before, after: [(check_step_end, (before, after))] if after is not before else [],
    ),
    PassSpec(
        LowerPrecision, "Program", "which operators compute in 16 bits; every cast is a node",
        lambda s, p: _planned(LowerPrecision, s, precision_of(s.plan)),
        lambda s, before, after: [
            (check_experts, (after.graph, s.plan.experts)), (check_names, (after, s.plan)),
        ],
    ),
    PassSpec(
        ChooseSharding, "ShardedProgram", "how each operator runs on each mesh axis: an integer program per axis",
        _choose,
    ),
    PassSpec(
        ShardParameters, "ShardedProgram", "which parameters are stored in slices (ZeRO), and when they are gathered",
        _store, planned=False,
    ),
    PassSpec(
        CutStages, "StagedProgram", "which pipeline stage each operator belongs to: the cut with the shortest step",
        lambda s, p: s.cut or _cut(s),
    ),
    PassSpec(
        InsertCommunication, "LocalProgram", "local shapes; every change of sharding is a `convert` node",
        lambda s, p: _planned(InsertCommunication, s, dict(s.request.rules), copies=expert_copies(s.plan)), _typed,
    ),
    PassSpec(
        FuseTokenDispatch, "LocalProgram", "tokens that would be combined and dispatched again stay where they are",
        lambda s, p: _planned(FuseTokenDispatch, s, s.request.rules),
        lambda s, old, new: [(check_token_dispatch, (old, new, s.request.rules))] if new is not old else [],
    ),
    PassSpec(
        FuseNorms, "LocalProgram", "which operators are one RMS norm, for which GPUs have a kernel",
        lambda s, p: _on_cuda(s, FuseNorms()),
        lambda s, before, after: [(check_norms, (before, after))] if after is not before else [],
    ),
    PassSpec(
        Differentiate, "DifferentiatedProgram", "the backward as nodes; each conversion transposed by its types",
        lambda s, p: s.differentiate, lambda s, before, after: [(check_fake_kernels, (after,))],
    ),
    PassSpec(
        Recompute, "DifferentiatedProgram", "what the backward computes, or gathers, again (activation checkpointing)",
        _recompute,
        lambda s, before, after: [(check_backward, (after, s.training, s.differentiate.templates, s.request.proven))],
    ),
    PassSpec(
        JoinSlices, "DifferentiatedProgram", "which gradients of slices are joined instead of added up",
        lambda s, p: _on_cuda(s, JoinSlices()),
        lambda s, before, after: [(check_joined, (before, after))] if after is not before else [],
    ),
    PassSpec(
        CoalesceCollectives, "DifferentiatedProgram", "which slices of parameters travel as one message",
        lambda s, p: _planned(CoalesceCollectives, s) if p.local.staged.sharded.gathered else None,
    ),
    PassSpec(
        Overlap, "DifferentiatedProgram", "when communication starts, and what is computed until it is waited for",
        _overlap,
        lambda s, before, after: [(check_overlap, (before, after))] if after is not before else [],
    ),
    PassSpec(
        SumInPlace, "DifferentiatedProgram", "which sums over ranks overwrite their terms",
        lambda s, p: _planned(SumInPlace, s),
        lambda s, before, after: [(check_in_place, (after,))],
    ),
    PassSpec(
        GatherEarly, "DifferentiatedProgram", "which parameters are on their way while the first forward computes",
        lambda s, p: _planned(GatherEarly, s) if s.plan.overlap else None,
        lambda s, before, after: [(check_early, (after,))],
    ),
    PassSpec(
        GenerateRanks, "DistributedProgram", "Python functions per stage, transfers, and a verified schedule",
        lambda s, p: _planned(GenerateRanks, s, s.request.mesh, s.stage_schedule, host=host_state(s.plan)),
        lambda s, before, after: [(check_code, (after,)), (check_slices, (after,)), (check_ranks, (after,))],
    ),
)  # fmt: skip
PIPELINE = tuple(_with_rewrites(_PASSES))
UNPLANNED = tuple(spec.kind for spec in PIPELINE if not spec.planned)


def passed(
    runner: PassRunner,
    setting: PassSetting,
    program: Any,
    upto: type,
    *,
    after: type | None = None,
    skip: Container[type] = (),
) -> Any:
    """Return ``program`` after the passes up to ``upto``, beginning with the one that follows ``after``."""
    kinds = [spec.kind for spec in PIPELINE]
    first = kinds.index(after) + 1 if after is not None else 0
    with without_messages_of_torch():  # passes and checks try what torch refuses, and then do otherwise
        for spec in PIPELINE[first : kinds.index(upto) + 1]:
            step = spec.make(setting, program) if spec.kind not in skip else None
            previous, program = program, runner(step, program) if step is not None else program
            for check, arguments in spec.checks(setting, previous, program):
                runner.check(check, *arguments)
    return program
