"""ShardedProgram -> StagedProgram: cut the operators, in their order, into balanced pipeline stages."""

from __future__ import annotations

import difflib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import fx

from ...core.annotations import facts, is_getitem, leaf, needs_grad, num_bytes, origin, tensor_inputs, values
from ...core.errors import CompileError
from ...core.sharding import Shard
from ...ir.cost_protocol import CostModel
from ...ir.program import Program, ShardedProgram, StagedProgram, outputs
from ...ops.user_derivatives import derivatives
from .partition import Array, balanced_starts

EMPTY = 1e3  # seconds: what a stage without parameters costs
MOST_PLACES = 400  # up to this many operators every cut is tried; beyond, the narrowest of each run of operators


@dataclass(frozen=True)
class CutStages:
    """Assign every operator that depends on a parameter to a stage.

    Before: %mm_3 = mm(%x, %w)
    After:  %mm_3 = mm(%x, %w) @ stage 1
    Ensures: stages are runs of operators in graph order, so no edge points back; none is empty; what no parameter
    touches has no stage and runs wherever it is needed; a derivative that the user wrote is in one stage, and so is all
    from where a buffer is read to where it changes, if the next microbatch reads it.

    The slowest stage (its operators, its parameters, what it receives and sends) is as fast as it can be, and among
    such cuts the sum of squares of all stages is least: exactly so for up to 400 operators, among the narrowest places
    beyond (dynamic programming over cut positions, as in PipeDream, Narayanan et al. 2019). Every stage has parameters
    where that is possible.

    ``boundaries``: where each stage but the first begins, as operator names or module paths; empty: chosen.

    Raises:
        CompileError: QN206 if there are fewer operators than stages, or a boundary does not fit.
    """

    num_stages: int
    cost: CostModel
    boundaries: tuple[str, ...] = ()

    def __call__(self, program: ShardedProgram, /) -> StagedProgram:
        order = staged_operators(program.program.graph)
        apart = _unbroken(program.program, order)
        most = len(order) - len(apart)
        if self.num_stages > max(1, most):
            raise CompileError(
                "QN206",
                f"{self.num_stages} stages, and the model has {most} operators that use parameters",
                fix=f"use pp={max(1, most)} or less, or fewer virtual stages",
            )
        if self.num_stages == 1:
            starts = []
        elif self.boundaries:
            starts = [apart.get(start, start) for start in _named_starts(self.boundaries, order, self.num_stages)]
        else:
            starts = _best_starts(_Loads(program, order, self.cost), self.num_stages, apart)
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


def _unbroken(program: Program, order: Sequence[fx.Node]) -> dict[int, int]:
    """Places inside a derivative that is the user's, or inside what reads and changes a buffer that microbatches carry
    on -> the place where it begins."""
    ends: dict[fx.Node, list[int]] = defaultdict(list)
    of, results = derivatives(program.graph), outputs(program.graph)
    place = {node: index for index, node in enumerate(order)}
    for node in order:
        if node in of:
            ends[of[node]].append(place[node])
    for node, found in program.leaves.items():
        becomes = origin(results[program.carried[found.name]])[0] if found.name in program.carried else None
        if becomes in place:  # anything else is computed in every stage that reads it
            ends[node] = [place[becomes], *(place[user] for user in _readers(program.graph, node) if user in place)]
    joined: list[tuple[int, int]] = []
    for first, last in sorted((min(found), max(found)) for found in ends.values()):
        if joined and first <= joined[-1][1]:
            first, last = joined[-1][0], max(last, joined.pop()[1])
        joined.append((first, last))
    return {inside: first for first, last in joined for inside in range(first + 1, last + 1)}


def _readers(graph: fx.Graph, source: fx.Node) -> set[fx.Node]:
    """The operators of stages that read ``source``, or what no parameter touches and is made of it."""
    staged, found, todo = _trained(graph), set[fx.Node](), [source]
    while todo:
        users = set(todo.pop().users) - found
        found |= users
        todo += users - staged
    return found


def parameter_stages(staged: StagedProgram) -> dict[fx.Node, tuple[int, ...]]:
    """The stages that hold each parameter: those that use it; the first if none does."""
    return {
        node: tuple(sorted({staged.stage[user] for user in node.users if user in staged.stage})) or (0,)
        for node, found in staged.sharded.program.leaves.items()
        if found.kind == "parameter"
    }


def stage_seconds(staged: StagedProgram, cost: CostModel) -> tuple[float, ...]:
    """What one rank's share of the operators of each stage takes, forward and backward."""
    found = [0.0] * staged.num_stages
    for node in staged_operators(staged.sharded.program.graph):
        found[staged.stage[node]] += _seconds(cost, staged.sharded, node)
    return tuple(found)


def boundaries(staged: StagedProgram) -> tuple[str, ...]:
    """Where the stages but the first begin: cutting there again gives the same stages."""
    first: dict[int, fx.Node] = {}
    order = staged_operators(staged.sharded.program.graph)
    for node in order:
        first.setdefault(staged.stage[node], node)
    places = module_starts(order)
    return tuple(places.get(first[stage], first[stage].name) for stage in range(1, staged.num_stages))


def module_starts(order: Sequence[fx.Node]) -> dict[fx.Node, str]:
    """Operators that are the first of a module, and the largest such module: names that mean the same in any trace."""
    found: dict[fx.Node, str] = {}
    seen: set[str] = set()
    for node in order:
        parts = facts(node).where.module.split(".")
        paths = [".".join(parts[: i + 1]) for i in range(len(parts))] if parts != [""] else []
        if new := [path for path in paths if path not in seen]:
            found[node] = new[0]
            seen.update(new)
    return found


def staged_operators(graph: fx.Graph) -> list[fx.Node]:
    """The operators that depend on a parameter, in order."""
    depends = _trained(graph)
    return [node for node in graph.nodes if node in depends and node.op == "call_function" and not is_getitem(node)]


def _trained(graph: fx.Graph) -> set[fx.Node]:
    """All parameters, and what depends on one."""
    depends: set[fx.Node] = set()
    for node in graph.nodes:
        found = leaf(node) if node.op == "placeholder" else None
        of_one = node.op == "call_function" and any(source in depends for source in node.all_input_nodes)
        if of_one or (found is not None and found.kind == "parameter"):
            depends.add(node)
    return depends


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
            known = [*dict.fromkeys(facts(n).where.module for n in order), *(n.name for n in order)]
            close = difflib.get_close_matches(name, known, n=3, cutoff=0.3)
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


class _Loads:
    """Seconds of any stage ``[i, j)`` of the operators."""

    def __init__(self, program: ShardedProgram, order: list[fx.Node], cost: CostModel) -> None:
        self.count = len(order)
        place = {node: i for i, node in enumerate(order)}
        work = np.array([_seconds(cost, program, n) for n in order])
        self.work = np.concatenate([[0.0], np.cumsum(work)])
        known = {n: [leaf(origin(x)[0]) for x in tensor_inputs(n)] for n in order}
        reads = [any(found is not None and found.kind == "parameter" for found in known[n]) for n in order]
        self.reads = np.concatenate([[0], np.cumsum(reads)])  # operators before a place that read parameters
        # One entry per use of a parameter or value: it is paid in a stage that begins after ``before`` (the use
        # before this one, or where the value is made) and not after ``at``.
        before, at, price = [], [], []
        # One entry per value: it is sent by a stage that makes it at ``made`` and ends before its ``last`` use.
        made, last, sent = [], [], []
        crossing = np.zeros(self.count + 1)
        for source, uses in _uses(order, place).items():
            node, output = source
            value = values(node)[output]
            size = num_bytes(value) * _kept(program, node, output)
            if leaf(node) is not None:
                seconds, previous = cost.parameter_seconds(size), -1
            elif node in place:
                ways = 2 if needs_grad(node) else 1
                seconds, previous = ways * cost.send_seconds(size), place[node]
                crossing[previous + 1 : uses[-1] + 1] += size
                made.append(previous)
                last.append(uses[-1])
                sent.append(seconds)
            else:
                continue
            for use in uses:
                before.append(previous)
                at.append(use)
                price.append(seconds)
                previous = use
        self.before, self.at, self.price = np.array(before, int), np.array(at, int), np.array(price, float)
        self.made, self.last, self.sent = np.array(made, int), np.array(last, int), np.array(sent, float)
        self.places = _narrow_places(crossing)

    def from_start(self, start: int) -> Array:
        """For every end j: seconds of the stage [start, j)."""
        paid = (self.before < start) & (self.at >= start)
        entering = np.bincount(self.at[paid], weights=self.price[paid], minlength=self.count)
        mine = self.made >= start
        ends = np.concatenate([self.made[mine] + 1, self.last[mine] + 1])  # from the first to before the second
        changes = np.concatenate([self.sent[mine], -self.sent[mine]])
        leaving = np.cumsum(np.bincount(ends, weights=changes, minlength=self.count + 1))
        empty = EMPTY * (self.reads == self.reads[start])
        loads: Array = self.work - self.work[start] + np.concatenate([[0.0], np.cumsum(entering)]) + leaving + empty
        return loads


def _uses(order: list[fx.Node], place: dict[fx.Node, int]) -> dict[tuple[fx.Node, int], list[int]]:
    found: dict[tuple[fx.Node, int], list[int]] = defaultdict(list)
    for node in order:
        for source in dict.fromkeys(origin(given) for given in tensor_inputs(node)):
            kind = leaf(source[0])
            if kind is None or kind.kind == "parameter":
                found[source].append(place[node])
    return found


def _seconds(cost: CostModel, program: ShardedProgram, node: fx.Node) -> float:
    return cost.operator_seconds(node) * _share(program, node) + cost.launch_seconds(node)


def _share(program: ShardedProgram, node: fx.Node) -> float:
    ways = [a.size for a, s in zip(program.axes, program.strategies[node], strict=True) if s.splits]
    return 1 / math.prod(ways)


def _kept(program: ShardedProgram, node: fx.Node, output: int) -> float:
    kinds = zip(program.axes, program.produced(node, output), strict=True)
    return 1 / math.prod(axis.size for axis, kind in kinds if isinstance(kind, Shard))


def _narrow_places(crossing: Array) -> list[int]:
    """Positions to cut at: all, or the narrowest of each run of operators."""
    inner = range(1, len(crossing) - 1)
    if len(inner) <= MOST_PLACES:
        return [0, *inner, len(crossing) - 1]
    run = math.ceil(len(inner) / MOST_PLACES)
    chosen = [min(inner[i : i + run], key=lambda p: (crossing[p], p)) for i in range(0, len(inner), run)]
    return [0, *chosen, len(crossing) - 1]


def _best_starts(loads: _Loads, num_stages: int, inside: Mapping[int, int]) -> list[int]:
    """Where stages 1, 2, ... begin: at none of the places ``inside`` what must not be cut."""
    places = np.array([place for place in loads.places if place not in inside])
    assert num_stages < len(places)
    seconds = np.stack([loads.from_start(start)[places] for start in places])
    return [int(places[start]) for start in balanced_starts(seconds, num_stages)]
