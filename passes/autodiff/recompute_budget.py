"""What each rank makes again so that its other saved values fit a budget."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch import Tensor, fx

from ...core.annotations import facts, leaf, memory_of, num_bytes, values
from ...core.errors import CompileError
from ...ir.program import DifferentiatedProgram
from ...schedules.schedule import Schedule, most_held
from .offload import OffloadActivations
from .recompute_cut import RecomputeCut, Seconds, cheap_values, cut, groups_of

FASTEST, SMALLEST = 1e-18, 1.0  # seconds for a byte: next to nothing, and more than any operator takes
Nodes = frozenset[fx.Node]


@dataclass(frozen=True)
class Budget:
    """At most ``bytes`` of saved values at once on each rank under ``schedule``; ``seconds`` of making a node again;
    ``offload``: what waits on the host then, of which nothing is counted."""

    bytes: int
    schedule: Schedule
    seconds: Seconds
    offload: OffloadActivations | None = None


def within_budget(program: DifferentiatedProgram, inside: set[fx.Node], always: Nodes, budget: Budget) -> set[fx.Node]:
    """Those of ``inside`` that are made again: on each rank the cheapest choice that was found. ``always``: what is
    made again anyway.

    For every block, the choices that are best for some price of a byte are minimum cuts. A rank's blocks move along
    them, those first that free most bytes for a second, until its schedule fits. What selective and full recomputing
    take is asked, too.

    Raises:
        CompileError: QN213 if what is left is too much for a rank.
    """
    return _Chooser(program, inside, always, budget).run()


@dataclass(frozen=True)
class _Move:
    """A block's next cut: makes ``after`` again in place of ``before``, at so many seconds for a byte."""

    price: float
    block: int
    before: Nodes
    after: Nodes


@dataclass
class _Chooser:
    program: DifferentiatedProgram
    inside: set[fx.Node]
    always: Nodes
    budget: Budget
    hulls: dict[Hashable, list[tuple[RecomputeCut, frozenset[int]]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        offload = self.budget.offload
        self.away: Callable[[int, fx.Node], bool] | None = None if offload is None else offload.away(self.program)

    def run(self) -> set[fx.Node]:
        placement, stage_of = self.budget.schedule.placement, self.program.stage
        groups, cheap = groups_of(self.program, self.inside), cheap_values(self.program, self.inside)
        found: set[fx.Node] = set()
        least: dict[int, int] = {}
        for rank in range(max(placement) + 1):
            stages = {stage for stage, home in enumerate(placement) if home == rank}
            mine = frozenset(node for node in self.inside if stage_of[node] in stages)
            moves = self._moves([nodes for (stage, _), nodes in groups.items() if stage in stages])
            options = [self._fewest(rank, stages, moves), mine - (mine - cheap), mine]
            needs = [self._needs(rank, stages, option) for option in options]
            least[rank] = min(size for size, _ in needs)
            fitting = [(seconds, number) for number, (size, seconds) in enumerate(needs) if size <= self.budget.bytes]
            found |= options[min(fitting)[1]] if fitting else mine
        rank = max(least, key=lambda rank: least[rank])  # one budget for all: it must do for the fullest
        if least[rank] > self.budget.bytes:
            raise CompileError(
                "QN213",
                f"stage rank {rank} saves {least[rank]} bytes at least, and the plan allows {self.budget.bytes}",
                fix=f"allow {1.00001 * least[rank] / 2**30:.6g} GiB, or use more microbatches",  # six digits round up
            )
        return found

    def _moves(self, groups: Sequence[list[fx.Node]]) -> list[_Move]:
        """All blocks' steps from the fastest cut to the smallest, the best first."""
        moves = []
        for block, nodes in enumerate(groups):
            points = [(one, frozenset(nodes[i] for i in places)) for one, places in self._hull(nodes)]
            moves.append(_Move(-1.0, block, frozenset(), points[0][1]))
            for (a, before), (b, after) in pairwise(points):
                moves.append(_Move((b.seconds - a.seconds) / max(1, a.bytes - b.bytes), block, before, after))
        return sorted(moves, key=lambda move: (move.price, move.block))

    def _fewest(self, rank: int, stages: set[int], moves: Sequence[_Move]) -> Nodes:
        """What is made again after as few moves as make the rank fit."""

        def after(count: int) -> Nodes:
            again: set[fx.Node] = set()
            for move in moves[:count]:
                again = (again - move.before) | move.after
            return frozenset(again)

        low, high = 0, len(moves)
        while low < high:
            middle = (low + high) // 2
            fits = self._needs(rank, stages, after(middle))[0] <= self.budget.bytes
            low, high = (low, middle) if fits else (middle + 1, high)
        return after(low)

    def _hull(self, nodes: list[fx.Node]) -> list[tuple[RecomputeCut, frozenset[int]]]:
        """From the fastest to the smallest, the cuts that are best for some price of a byte, and the places of their
        nodes. Equal blocks have equal ones."""
        places = {node: place for place, node in enumerate(nodes)}
        key = tuple((str(n.target), _kinds(n), tuple(places.get(s, -1) for s in n.all_input_nodes)) for n in nodes)
        if key not in self.hulls:
            fastest, smallest = (cut(nodes, self.budget.seconds, price) for price in (FASTEST, SMALLEST))
            cuts = [fastest, *self._between(nodes, fastest, smallest), smallest]
            self.hulls[key] = [(one, frozenset(places[n] for n in one.again)) for one in cuts]
        return self.hulls[key]

    def _between(self, nodes: list[fx.Node], fast: RecomputeCut, small: RecomputeCut) -> list[RecomputeCut]:
        if small.bytes >= fast.bytes:
            return []
        price = (small.seconds - fast.seconds) / (fast.bytes - small.bytes)
        found = cut(nodes, self.budget.seconds, price)
        least = fast.seconds + price * fast.bytes
        if found.seconds + price * found.bytes >= least * (1 - 1e-6) or found.bytes in (fast.bytes, small.bytes):
            return []
        return [*self._between(nodes, fast, found), found, *self._between(nodes, found, small)]

    def _needs(self, rank: int, stages: set[int], again: Nodes) -> tuple[int, float]:
        """Bytes that the rank's schedule holds, and seconds of a microbatch of each of its stages."""
        kept: dict[int, set[fx.Node]] = {stage: set() for stage in stages}
        seconds, seen = 0.0, set[fx.Node]()
        for node in self.program.graph.nodes:
            home = self.program.stage.get(node)
            if home not in kept or facts(node).phase != "backward":
                continue
            todo = list(node.all_input_nodes)
            while todo:
                source = todo.pop()
                if source in again or source in self.always:
                    if source not in seen:
                        seen.add(source)
                        seconds += self.budget.seconds(source) if source in again else 0.0
                        todo += source.all_input_nodes
                elif facts(source).phase == "forward" and self._saved(memory := self._memory(source, home), home):
                    kept[home].add(memory)
        sizes = {stage: sum(map(_bytes, found)) for stage, found in kept.items()}
        return most_held(self.budget.schedule, lambda stage: sizes.get(stage, 0))[rank], seconds

    def _memory(self, node: fx.Node, stage: int) -> fx.Node:
        """What is received lies in memory of its own."""
        return memory_of(node) if self.program.stage.get(node) == stage else node

    def _saved(self, node: fx.Node, stage: int) -> bool:
        """Whether memory lives on the device from a forward of ``stage`` to its backward: not the batch's, or what is
        made once a step, or waits on the host."""
        if node.op != "call_function" or leaf(node) is not None or node in self.program.once:
            return False
        return node in self.program.stage and not (self.away is not None and self.away(stage, node))


def _kinds(node: fx.Node) -> tuple[object, ...]:
    """What a node makes, and whether a backward reads it."""
    made = tuple((tuple(x.shape), x.dtype) for x in values(node) if isinstance(x, Tensor))
    return made, any(user.op == "call_function" and facts(user).phase == "backward" for user in node.users)


def _bytes(node: fx.Node) -> int:
    return sum(num_bytes(x) for x in values(node) if isinstance(x, Tensor))
