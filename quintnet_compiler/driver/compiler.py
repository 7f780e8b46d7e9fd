"""The passes, in order, as plain code."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from torch import fx

from ..capture.modes import modes_of_a_trace
from ..core.errors import CompileError
from ..core.mesh import Mesh
from ..core.replaced import new_garbage_only, one_thread
from ..core.sharding import AxisType
from ..cost_models.cluster import Cluster
from ..cost_models.cluster_costs import ClusterCosts
from ..cost_models.roofline import Roofline
from ..ir.distributed_program import DistributedProgram
from ..ir.invariants import verify_invariants
from ..ir.plan import Plan
from ..ir.program import Captured, DifferentiatedProgram, ShardedProgram, StagedProgram
from ..ops.rules.table import RULES
from ..passes.autodiff.differentiate import Differentiate
from ..passes.codegen.generate_ranks import GenerateRanks
from ..passes.lowering.coalesce_collectives import CoalesceCollectives
from ..passes.sharding.axis_view import stores_state
from ..passes.sharding.replicated import unsplit
from ..passes.sharding.shard_parameters import stored_whole, storing_axes
from ..passes.stages.cut_stages import CutStages, boundaries, parameter_stages, stage_times
from ..passes.stages.follow_stages import FollowStages
from ..schedules.kinds import forward_only
from ..schedules.schedule import Schedule
from ..schedules.synthesis import schedule_of
from ..strategies.rule_book import MissingRule, RowRule
from .pipeline import REWRITES, PassSetting, Request, axes_of, expert_axes, node_seconds, passed

A = TypeVar("A")
B = TypeVar("B")


@dataclass
class Runner:
    """Runs passes: verifies each result and keeps its time; ``keep``: the program after each pass, too."""

    keep: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    programs: list[tuple[str, Any]] = field(default_factory=list)

    def __call__(self, step: Callable[[A], B], program: A) -> B:
        start = time.perf_counter()
        result = step(program)
        verify_invariants(result)
        name = type(step).__name__
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        if self.keep:
            self.programs.append((name, result))
        return result

    def check(self, prove: Callable[..., None], *given: Any) -> None:
        """Time a check that needs more than one program."""
        start = time.perf_counter()
        prove(*given)
        name = prove.__name__
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class Compiled:
    """A compiled program and the plan that it follows, complete.

    ``unsplit``, ``wide``: what is not split, and what features leave as it is, and why.

    Kept are the program and the graphs that it was made from (``program.source``: captured, canonical, local,
    differentiated), which reports and the search for a NaN read. What was between them is not: ``again`` makes it.
    """

    program: DistributedProgram
    plan: Plan
    seconds: Mapping[str, float]
    stages: Mapping[str, tuple[int, ...]]
    unsplit: tuple[str, ...]
    wide: tuple[str, ...]
    again: Callable[[Runner], Any] = field(repr=False, compare=False)

    def passes(self) -> list[tuple[str, Any]]:
        """The name of each pass and the program after it, compiled again."""
        runner = Runner(keep=True)
        with modes_of_a_trace():
            self.again(runner)
        return runner.programs


MOST_RULES = 8  # of operators that are tried to be split by their rows


@one_thread()
@new_garbage_only()
def compile_program(captured: Captured, request: Request, runner: Runner, *, training: bool = True) -> Compiled:
    """Captured model -> programs of all ranks; not ``training``: forwards alone, in the order of the plan's stages.

    Raises:
        CompileError: see the passes.
    """
    with _tried(request, lambda other: _compiled(captured, other, Runner(), training=training)):
        return _compiled(captured, request, runner, training=training)


@contextlib.contextmanager
def _tried(request: Request, compiled: Callable[[Request], Any]) -> Iterator[None]:
    """Add to an error about an operator without a rule whether the program compiles with that operator replicated."""
    try:
        yield
    except CompileError as error:
        if error.code != "QN202" or request.plan.unknown_ops != "error":
            raise
        replicated = replace(request, plan=request.plan.changed({"unknown_ops": "replicate"}))
        try:
            compiled(replicated)
        except Exception as other:  # of whatever kind: it is told, and the first error is the answer
            kind = other.code if isinstance(other, CompileError) else f"{type(other).__name__}:"
            cause = getattr(other, "message", str(other))
            text = f'{error.message}\n  unsplit, with plan={{"unknown_ops": "replicate"}}: {kind} {cause}'
            fix = _rules_tried(error, request, compiled) or _whole_batches_tried(replicated, compiled)
            fix = fix or error.fix or "write that line with other operators"
            raise CompileError(error.code, text, where=error.where, fix=fix) from error
        fix = 'run it unsplit: plan={"unknown_ops": "replicate"}'
        raise CompileError(error.code, error.message, where=error.where, fix=fix) from error


def _rules_tried(error: CompileError, request: Request, compiled: Callable[[Request], Any]) -> str:
    """Return the rules to write where operators without one compute each row alone; "" where that does not compile."""
    added: list[RowRule] = []
    while isinstance(error, MissingRule) and error.row_rule is not None and len(added) < MOST_RULES:
        added.append(error.row_rule)
        rules = {**request.rules, **{row_rule.target: row_rule.rule for row_rule in added}}
        try:
            compiled(replace(request, rules=rules))
        except CompileError as other:
            error = other
            continue
        except Exception:  # of whatever kind: it is no fix
            return ""
        return f"if it computes each row on its own: rules=[{', '.join(map(str, added))}]"
    return ""


def _whole_batches_tried(request: Request, compiled: Callable[[Request], Any]) -> str:
    """Return what to write where operators without a rule run on whole batches; "" where that does not compile."""
    if request.plan.microbatches == 1:
        return ""
    try:
        compiled(replace(request, plan=request.plan.changed({"microbatches": 1})))
    except Exception:  # of whatever kind: it is no fix
        return ""
    return 'run it unsplit: plan={"unknown_ops": "replicate", "microbatches": 1}'


def _compiled(captured: Captured, request: Request, runner: Runner, *, training: bool) -> Compiled:
    mesh, plan = request.mesh, request.plan
    microbatches = _microbatches(request, training=training)
    setting = _setting(request, microbatches, training=training)
    staged = passed(runner, setting, captured, CutStages)
    sharded = staged.sharded
    schedule = _schedule(request, staged, microbatches)
    if not training:
        schedule = forward_only(schedule.placement, microbatches)
    program = passed(runner, replace(setting, schedule=schedule), staged, GenerateRanks, after=CutStages)
    whole = unsplit(sharded, setting.book)
    whole += stored_whole(sharded, plan.zero_axes if plan.zero else ())
    again = partial(compile_program, captured, request, training=training)
    complete = _complete(plan, mesh, sharded, staged, program)
    wide = tuple(line for rewrite in REWRITES for line in rewrite.notes(sharded.program, plan))
    return Compiled(program, complete, runner.seconds, _stages(staged), whole, wide, again)


@one_thread()
@new_garbage_only()
def follow_program(
    captured: Captured, request: Request, primary: Compiled, runner: Runner, *, training: bool
) -> DistributedProgram:
    """Another program on the state of ``primary``: another batch size, evaluation, or outputs instead of the loss."""
    with _tried(request, lambda other: _followed(captured, other, primary, Runner(), training=training)):
        return _followed(captured, request, primary, runner, training=training)


def _followed(
    captured: Captured, request: Request, primary: Compiled, runner: Runner, *, training: bool
) -> DistributedProgram:
    return generated(*followed_graph(captured, request, primary, runner, training=training), runner)


def followed_graph(
    captured: Captured, request: Request, primary: Compiled, runner: Runner, *, training: bool
) -> tuple[PassSetting, DifferentiatedProgram]:
    """Return the program of :func:`follow_program`, before nodes are ordered to hide communication, and the setting.

    Raises:
        CompileError: see the passes.
    """
    microbatches = _microbatches(request, training=training)
    placement = primary.program.schedule.placement
    follow = FollowStages(len(placement), primary.stages)
    setting = replace(_setting(request, microbatches, training=training), cut=follow)
    staged = passed(runner, setting, captured, CutStages)
    if training:
        schedule = _schedule(request, staged, microbatches, placement)
    else:
        schedule = forward_only(placement, microbatches)
    setting = replace(setting, schedule=schedule)
    return setting, passed(runner, setting, staged, CoalesceCollectives, after=CutStages)


def generated(setting: PassSetting, program: DifferentiatedProgram, runner: Runner) -> DistributedProgram:
    """Order a program's nodes, which depends on prices and so on sizes, and return the code of all ranks."""
    generated_program: DistributedProgram = passed(runner, setting, program, GenerateRanks, after=CoalesceCollectives)
    return generated_program


def _microbatches(request: Request, *, training: bool) -> int:
    """The plan's, or as many as the fullest data rank has rows, if these are fewer. Where nothing is trained, a number
    of which each has as many rows; one, where each would be a batch of its own: evaluation is of the whole batch."""
    plan, rows = request.plan, -(-request.batch_size // request.mesh.data_ways)
    if training:
        return min(plan.microbatches, rows)
    return math.gcd(rows, plan.microbatches if plan.batch_statistics == "batch" else 1)


def _schedule(
    request: Request, staged: StagedProgram, microbatches: int, placement: tuple[int, ...] | None = None
) -> Schedule:
    plan, ranks = request.plan, request.mesh["pp"]
    times = partial(stage_times, staged, _prices(request))
    return schedule_of(plan.schedule, ranks, microbatches, plan.virtual_stages, times, placement)


def _node_seconds(request: Request) -> Callable[[fx.Node], float]:
    """Return the prices of the nodes of a rank's graph, whatever the device will be."""
    return node_seconds(_prices(request), ClusterCosts(Cluster("h100"), _prices(request).unknown))


def _prices(request: Request) -> Roofline:
    """Return prices; operators with a rule of the user's own, or that may run without any, cost their bytes."""
    allowed = request.plan.unknown_ops == "replicate" or not axes_of(request.mesh, 1)
    unpriced = allowed or not request.rules.keys() <= RULES.keys()
    return Roofline(unknown="memory" if unpriced else "error")


def _setting(request: Request, microbatches: int, *, training: bool) -> PassSetting:
    return PassSetting(request, microbatches, _prices(request), _node_seconds(request), Differentiate(training))


def _stages(staged: StagedProgram) -> dict[str, tuple[int, ...]]:
    leaves = staged.sharded.program.leaves
    return {leaves[node].name: stages for node, stages in parameter_stages(staged).items()}


def _complete(
    plan: Plan, mesh: Mesh, sharded: ShardedProgram, staged: StagedProgram, program: DistributedProgram
) -> Plan:
    decided = [(i, axis.name) for i, axis in enumerate(sharded.axes) if axis.role == "model"]
    storing = [(i, sharded.axes[i]) for i in storing_axes(sharded)]
    decided += [(i, axis.name) for i, axis in storing if stores_state(axis, expert_axes(plan))]
    kinds: dict[str, dict[str, str]] = {}
    for spec in program.state.values():
        if spec.kind == "parameter" and decided:
            types: dict[str, AxisType] = {name: spec.sharding[i] for i, name in decided}
            kinds[spec.name] = {name: str(kind) for name, kind in types.items()}
    return plan.model_copy(update={"mesh": dict(mesh.axes), "parameters": kinds, "stages": boundaries(staged)})
