"""Build the units of a layout: run the folded model through the compiler's passes, once per kind of layout."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import fx

from ..core.absent_gpu import CPU, CUDA, AbsentGpu
from ..core.annotations import is_getitem
from ..core.errors import CompileError
from ..core.mesh import Mesh
from ..driver.pipeline import UNPLANNED, Pass, PassSetting, Request, node_seconds, passed
from ..features.answers import host_state
from ..ir.cost_protocol import CostModel, RankCosts, guesses
from ..ir.distributed_program import DistributedProgram
from ..ir.plan import Plan
from ..ir.program import DifferentiatedProgram
from ..ops.rules.notation import Rule
from ..passes.autodiff.differentiate import Differentiate
from ..passes.autodiff.recompute import Recompute
from ..passes.codegen.generate_ranks import GenerateRanks
from ..passes.frontend.lower_precision import LowerPrecision
from ..passes.lowering.sum_in_place import SumInPlace
from ..passes.sharding.choose_sharding import Solved
from ..passes.sharding.fold_blocks import Folded
from ..passes.stages.cut_stages import CutStages
from ..schedules.schedule import Action, Op, Schedule
from ..simulation.footprint import Footprints
from ..strategies.expert_axes import expert_parameters
from .layouts import Layout
from .stage_units import StageUnit, unit_boundaries, unit_work

MIN_COMPILE_OPS = 40  # operators added to the count of every compilation
RECOMPUTE_COMPILE_SHARE = 0.3  # share of the compile time that another recompute mode takes
T = TypeVar("T")


@dataclass
class Builder:
    """Units of layouts, cached by what they depend on; errors are cached too.

    Attributes:
        cost: prices by which shardings are chosen.
        costs: prices of ranks.
        found: the cache.
        guessed: operators whose price is a bound.
        solved: solutions of sharding problems.
        work: operators that were compiled.
        learned: functions that were compiled, or refused, in order.
    """

    folded: Folded
    plan: Plan
    rules: Mapping[Any, Rule]
    cost: CostModel
    costs: RankCosts
    differentiate: Differentiate = field(default_factory=Differentiate)
    found: dict[Hashable, Any] = field(default_factory=dict)
    guessed: set[str] = field(default_factory=set)
    solved: Solved = field(default_factory=dict)
    work: float = 0.0
    learned: dict[Layout, None] = field(default_factory=dict)

    def __call__(self, layout: Layout, costs: RankCosts | None = None, kind: Hashable = None) -> tuple[StageUnit, ...]:
        """Return the units of a layout.

        ``costs``: replace those of the builder, for a place of unlike devices; ``kind``: the cache key of ``costs``.

        Raises:
            CompileError: whatever the compiler says of the layout.
        """
        if layout.ep > 1 and not self.has_experts:
            # ep is a second data axis, and functions are those of one axis as long as the two
            merged = replace(layout, ep=1, dp=layout.dp * layout.ep)
            key = "hybrid", merged.inside, kind
            return self._cached(key, lambda: tuple(unit.over_two_axes() for unit in self(merged, costs, kind)))
        inside = layout.inside
        if costs is None:
            return self._cached(("units", inside), lambda: self._units(inside))

        def priced() -> tuple[StageUnit, ...]:
            program, memory = self._cached(("made", inside), lambda: _with_memory(self._compiled(inside)))
            return unit_work(program, self.folded, costs, memory)

        return self._cached(("units", inside, kind), priced)

    def _units(self, inside: Layout) -> tuple[StageUnit, ...]:
        self.learned[inside] = None
        return unit_work(self._compiled(inside), self.folded, self.costs)

    def deciding(self, plan: Plan) -> Builder:
        """Return a builder for a plan that differs in passes after differentiation; what these read is reused."""
        reusable: dict[Hashable, Any] = {key: program for key, program in self.found.items() if isinstance(key, Layout)}
        return replace(self, plan=plan, found=reusable, guessed=set(), learned={})

    @cached_property
    def has_experts(self) -> bool:
        """Return whether the model has expert parameters."""
        return bool(expert_parameters(self.folded.program.graph))

    def check_prices(self) -> None:
        """Check that all operators have prices.

        Raises:
            CompileError: QN210 with every operator of the model, or of its backward, that has no price.
        """
        program = self.folded.program
        forward = [n for n in program.graph.nodes if n.op == "call_function" and not is_getitem(n)]
        _all_priced(forward, self.cost.operator_seconds)
        nodes = self._passed(self._setting(Plan(unknown_ops=self.plan.unknown_ops), Mesh(), 1)).graph.nodes
        _all_priced([n for n in nodes if n.op == "call_function" and not is_getitem(n)], self.costs.node_seconds)

    @property
    def _compile_work(self) -> float:
        return MIN_COMPILE_OPS + len(self.folded.program.graph.nodes)

    def _cached(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self.found:
            try:
                self.found[key] = make()
            except CompileError as error:
                self.found[key] = error
        result: T | CompileError = self.found[key]
        if isinstance(result, CompileError):
            raise result
        return result

    def _compiled(self, layout: Layout) -> DistributedProgram:
        differentiated = self._cached(layout.sharded, lambda: self._differentiated(layout.sharded))
        if layout.recompute != "none" or self.plan.reshard_after_forward:
            differentiated = Recompute(layout.recompute, self.plan.reshard_after_forward)(differentiated)
        mesh = self._mesh(layout)
        order = _each_twice if host_state(self.plan).values else _each_once
        schedule = order(layout, mesh["pp"])
        setting = replace(self._setting(layout.decided(self.plan), mesh, layout.microbatches), schedule=schedule)
        differentiated = passed(
            _UncheckedRunner(), setting, differentiated, SumInPlace, after=Recompute, skip=UNPLANNED
        )
        self.guessed.update(guesses(differentiated.graph.nodes, self.costs))
        self.work += RECOMPUTE_COMPILE_SHARE * self._compile_work
        return GenerateRanks(mesh, schedule, checked=False, expect=self.plan.expect)(differentiated)

    def _mesh(self, layout: Layout) -> Mesh:
        """Return the layout's mesh, with a stage for each unit."""
        sizes = {name: size for name, size in layout.mesh.axes if name != "pp"}
        return Mesh(pp=len(unit_boundaries(self.folded)) + 1, **sizes)

    def _differentiated(self, layout: Layout) -> DifferentiatedProgram:
        plan, mesh = layout.decided(self.plan), self._mesh(layout)
        setting = self._setting(plan, mesh, layout.microbatches)
        program = self._passed(replace(setting, cut=CutStages(mesh["pp"], self.cost, unit_boundaries(self.folded))))
        self.work += (1 - RECOMPUTE_COMPILE_SHARE) * self._compile_work
        return program

    def _setting(self, plan: Plan, mesh: Mesh, microbatches: int) -> PassSetting:
        program = self.folded.program
        request = Request(mesh, plan, program.batch_size, device_of(program.absent), self.rules, absent=program.absent)
        seconds = node_seconds(self.cost, self.costs)
        return PassSetting(
            request, microbatches, self.cost, seconds, self.differentiate, self.folded.repeats, solved=self.solved
        )

    def _passed(self, setting: PassSetting) -> DifferentiatedProgram:
        """Return the folded model after the compiler's passes.

        ZeRO and parameters on hosts are priced without a graph, from the parameters of a stage (:mod:`.stages`).
        """
        program: DifferentiatedProgram = passed(
            _UncheckedRunner(),
            setting,
            self.folded.program,
            Differentiate,
            after=LowerPrecision,
            skip=UNPLANNED,
        )
        return program


class _UncheckedRunner:
    """Runs passes without their checks: the compiler compiles and checks the chosen plan again."""

    def __call__(self, step: Pass, program: Any) -> Any:
        """Run a pass."""
        return step(program)

    def check(self, prove: Callable[..., None], *arguments: Any) -> None:
        """Skip a check."""


def _all_priced(nodes: Iterable[fx.Node], price: Callable[[fx.Node], float]) -> None:
    missing: dict[str, CompileError] = {}
    for node in nodes:
        try:
            price(node)
        except CompileError as error:
            missing.setdefault(str(node.target), error)
    if missing:
        first = next(iter(missing.values()))
        raise CompileError(
            "QN210",
            f"no price for {', '.join(missing)}: a plan would count too little",
            where=first.where,
            fix=first.fix,
        )


def _with_memory(program: DistributedProgram) -> tuple[DistributedProgram, Footprints]:
    return program, Footprints(program)


def device_of(gpu: AbsentGpu | None) -> torch.device:
    """Return the device of a cluster's programs: its GPUs, whatever this machine has."""
    return CPU if gpu is None else CUDA


def _each_once(layout: Layout, stages: int) -> Schedule:
    """Return a schedule that runs each function once, which suffices to price them."""
    rows = tuple((Action(Op.FORWARD, stage, 0), *_backward(layout, stage, 0)) for stage in range(stages))
    return Schedule("one", layout.microbatches, tuple(range(stages)), rows)


def _each_twice(layout: Layout, stages: int) -> Schedule:
    """Return a schedule with another forward between a microbatch's forward and backward, except on the last stages.

    Passes ask a schedule whether there is time for copies. So the answer is that for the stage's place in the model:
    no for the last block and what follows it.
    """
    rows = []
    for stage in range(stages):
        ahead = [Action(Op.FORWARD, stage, number) for number in range(2)]
        back = [_backward(layout, stage, number) for number in range(2)]
        last = stage >= stages - 2
        rows.append((ahead[0], *back[0], ahead[1], *back[1]) if last else (*ahead, *back[0], *back[1]))
    return Schedule("two", layout.microbatches, tuple(range(stages)), tuple(rows))


def _backward(layout: Layout, stage: int, microbatch: int) -> tuple[Action, ...]:
    halves = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT) if layout.halves else (Op.BACKWARD,)
    return tuple(Action(op, stage, microbatch) for op in halves)
