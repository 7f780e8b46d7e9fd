"""ShardedProgram -> StagedProgram: cut the operators, in their order, into balanced pipeline stages."""

from __future__ import annotations

import difflib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from ...core.annotations import depending_on_parameters, facts, is_getitem, operators_of_parameters, origin
from ...core.errors import CompileError
from ...ir.cost_protocol import CostModel
from ...ir.program import Program, ShardedProgram, StagedProgram, outputs
from ...ops.derivatives.user_derivatives import derivatives
from ...schedules.kinds import one_f_one_b
from ...schedules.schedule import Schedule
from ...schedules.synthesis import StageTimes
from .fastest_cut import FastestCut
from .stage_loads import StageLoads, operator_times
from .step_clock import StepClock


@dataclass(frozen=True)
class CutStages:
    """Assign every operator that depends on a parameter to a stage.

    Before: %mm_3 = mm(%x, %w)
    After:  %mm_3 = mm(%x, %w) @ stage 1
    Ensures: stages are runs of operators in graph order, so no edge points back; none is empty. Operators that depend
    on no parameter have no stage, and run wherever they are needed. A derivative that the user wrote is in one stage;
    so are all operators from the first that reads a buffer to the one that changes it, if the next microbatch reads it.

    The cut with the shortest step is chosen, by prices of operators and sends, see :class:`.fastest_cut.FastestCut`;
    among equally fast cuts, the one whose stages have equal work. With more than 400 operators, stages begin at the
    narrowest places. Every stage has parameters if that is possible.

    ``boundaries``: the first operator of each stage but the first, as operator names or module paths; empty: chosen.
    ``schedule``: runs the stages; None: 1F1B with four microbatches for each.

    Raises:
        CompileError: QN206 if there are fewer operators than stages, or a boundary does not fit.
    """

    num_stages: int
    cost: CostModel
    boundaries: tuple[str, ...] = ()
    schedule: Schedule | None = None

    def __call__(self, program: ShardedProgram, /) -> StagedProgram:
        order = operators_of_parameters(program.program.graph)
        uncut = _uncut_places(program.program, order)
        most = len(order) - len(uncut)
        if self.num_stages > max(1, most):
            raise CompileError(
                "QN206",
                f"{self.num_stages} stages, and the model has {most} operators that use parameters",
                fix=f"use pp={max(1, most)} or less, or fewer virtual stages",
            )
        if self.num_stages == 1:
            starts = []
        elif self.boundaries:
            starts = [uncut.get(start, start) for start in _named_starts(self.boundaries, order, self.num_stages)]
        else:
            schedule = self.schedule or one_f_one_b(self.num_stages, 4 * self.num_stages)
            loads = StageLoads(program, order, self.cost)
            starts = FastestCut(loads, StepClock(schedule), frozenset(uncut)).starts()
        stage: dict[fx.Node, int] = {}
        current = 0
        for index, node in enumerate(order):
            while current < len(starts) and starts[current] <= index:
                current += 1
            stage[node] = current
        for node in program.program.graph.nodes:
            if is_getitem(node) and origin(node)[0] in stage:
                stage[node] = stage[origin(node)[0]]
        return StagedProgram(program, self.num_stages, stage)


def _uncut_places(program: Program, order: Sequence[fx.Node]) -> dict[int, int]:
    """Return the places where no stage may begin, each with the first place of its run of operators.

    Runs are the user's derivatives, and the operators that read and change a buffer that microbatches pass on.
    """
    members: dict[fx.Node, list[int]] = defaultdict(list)
    derivative_of, results = derivatives(program.graph), outputs(program.graph)
    place = {node: index for index, node in enumerate(order)}
    for node in order:
        if node in derivative_of:
            members[derivative_of[node]].append(place[node])
    for node, buffer in program.leaves.items():
        new = origin(results[program.carried[buffer.name]])[0] if buffer.name in program.carried else None
        if new in place:  # anything else is computed in every stage that reads it
            members[node] = [place[new], *(place[user] for user in _readers(program.graph, node) if user in place)]
    joined: list[tuple[int, int]] = []
    for first, last in sorted((min(places), max(places)) for places in members.values()):
        if joined and first <= joined[-1][1]:
            first, last = joined[-1][0], max(last, joined.pop()[1])
        joined.append((first, last))
    return {inside: first for first, last in joined for inside in range(first + 1, last + 1)}


def _readers(graph: fx.Graph, source: fx.Node) -> set[fx.Node]:
    """Return the users of ``source``, and those of its users that depend on no parameter."""
    staged, readers, todo = depending_on_parameters(graph), set[fx.Node](), [source]
    while todo:
        users = set(todo.pop().users) - readers
        readers |= users
        todo += users - staged
    return readers


def parameter_stages(staged: StagedProgram) -> dict[fx.Node, tuple[int, ...]]:
    """Return the stages that hold each parameter: those that use it; the first if none does."""
    return {
        node: tuple(sorted({staged.stage[user] for user in node.users if user in staged.stage})) or (0,)
        for node, stored in staged.sharded.program.leaves.items()
        if stored.kind == "parameter"
    }


def stage_times(staged: StagedProgram, cost: CostModel) -> tuple[StageTimes, ...]:
    """Return the time of each stage's operators for one microbatch on one rank."""
    totals = [[0.0, 0.0, 0.0] for _ in range(staged.num_stages)]
    for node in operators_of_parameters(staged.sharded.program.graph):
        times = operator_times(staged.sharded, node, cost)
        for part, seconds in enumerate((times.forward, times.input, times.weight)):
            totals[staged.stage[node]][part] += seconds
    return tuple(StageTimes(*total) for total in totals)


def boundaries(staged: StagedProgram) -> tuple[str, ...]:
    """Return the names of the first operators of all stages but the first; cutting there gives the same stages."""
    first: dict[int, fx.Node] = {}
    order = operators_of_parameters(staged.sharded.program.graph)
    for node in order:
        first.setdefault(staged.stage[node], node)
    places = module_starts(order)
    return tuple(places.get(first[stage], first[stage].name) for stage in range(1, staged.num_stages))


def module_starts(order: Sequence[fx.Node]) -> dict[fx.Node, str]:
    """Return the first operators of modules, each with its largest module: names that mean the same in any trace."""
    starts: dict[fx.Node, str] = {}
    seen: set[str] = set()
    for node in order:
        parts = facts(node).where.module.split(".")
        paths = [".".join(parts[: i + 1]) for i in range(len(parts))] if parts != [""] else []
        if new := [path for path in paths if path not in seen]:
            starts[node] = new[0]
            seen.update(new)
    return starts


def _named_starts(names: tuple[str, ...], order: list[fx.Node], num_stages: int) -> list[int]:
    if len(names) != num_stages - 1:
        raise CompileError(
            "QN206",
            f"the plan names {len(names)} boundaries for {num_stages} stages",
            fix=f"name {num_stages - 1}, or none",
        )
    starts = []
    for name in names:
        inside = f"{name}."
        place = next(
            (i for i, n in enumerate(order) if n.name == name or f"{facts(n).where.module}.".startswith(inside)), None
        )
        if place is None:
            names_in_order = [*dict.fromkeys(facts(n).where.module for n in order), *(n.name for n in order)]
            close = difflib.get_close_matches(name, names_in_order, n=3, cutoff=0.3)
            raise CompileError(
                "QN206", f"no operator or module is called {name!r}", fix=f"did you mean {', '.join(close)}?"
            )
        starts.append(place)
    if starts != sorted(set(starts)) or starts[0] == 0:
        raise CompileError(
            "QN206",
            f"the boundaries {', '.join(names)} do not follow each other in the model",
            fix="name them in the order of the forward pass, and not its beginning",
        )
    return starts
