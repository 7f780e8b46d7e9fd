"""Choose the values that each rank recomputes so that its other saved values fit a budget."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from torch import Tensor, fx

from ...core.annotations import facts, leaf, memory_of, num_bytes, values
from ...core.errors import CompileError
from ...ir.program import DifferentiatedProgram
from ...schedules.schedule import Schedule, most_held
from .recompute_cut import RecomputeCut, Seconds, cheap_values, cheapest_cut, groups_of

MIN_BYTE_SECONDS, MAX_BYTE_SECONDS = 1e-18, 1.0  # prices of a byte: almost nothing, and more than any operator takes
Nodes = frozenset[fx.Node]
Leaves = Callable[[int, fx.Node], bool]  # whether a value that a stage saves leaves its device until the backward


@dataclass(frozen=True)
class Budget:
    """The most bytes of values that a rank may save at once under ``schedule``.

    ``seconds``: returns the time of recomputing a node. ``leaving``: values that one of these is true of do not count.
    """

    bytes: int
    schedule: Schedule
    seconds: Seconds
    leaving: tuple[Leaves, ...] = ()


def within_budget(program: DifferentiatedProgram, inside: set[fx.Node], always: Nodes, budget: Budget) -> set[fx.Node]:
    """Return the nodes of ``inside`` to recompute: on each rank, the fastest choice found that fits.

    ``always``: nodes that are recomputed anyway. For every block, the choices that are best for some price of a byte
    are minimum cuts. A rank's blocks move along them, in the order of bytes freed per second, until its schedule fits.
    Selective and full recomputation are candidates, too.

    Raises:
        CompileError: QN213 if a rank saves too much whatever is recomputed.
    """
    return _Chooser(program, inside, always, budget).choose_nodes()


@dataclass(frozen=True)
class _Move:
    """A block's next cut, which recomputes ``after`` in place of ``before``; ``price``: in seconds per byte."""

    price: float
    block: int
    before: Nodes
    after: Nodes


@dataclass
class _Chooser:
    """The search for the nodes to recompute. ``hulls``: the best cuts of each kind of block."""

    program: DifferentiatedProgram
    inside: set[fx.Node]
    always: Nodes
    budget: Budget
    hulls: dict[Hashable, list[tuple[RecomputeCut, frozenset[int]]]] = field(default_factory=dict)

    def choose_nodes(self) -> set[fx.Node]:
        placement, stage_of = self.budget.schedule.placement, self.program.stage
        groups, cheap = groups_of(self.program, self.inside), cheap_values(self.program, self.inside)
        recomputed: set[fx.Node] = set()
        least: dict[int, int] = {}
        for rank in range(max(placement) + 1):
            stages = {stage for stage, home in enumerate(placement) if home == rank}
            mine = frozenset(node for node in self.inside if stage_of[node] in stages)
            moves = self._moves([nodes for (stage, _), nodes in groups.items() if stage in stages])
            options = [self._fewest(rank, stages, moves), mine - (mine - cheap), mine]
            needs = [self._needs(rank, stages, option) for option in options]
            least[rank] = min(size for size, _ in needs)
            fitting = [(seconds, number) for number, (size, seconds) in enumerate(needs) if size <= self.budget.bytes]
            recomputed |= options[min(fitting)[1]] if fitting else mine
        rank = max(least, key=lambda rank: least[rank])  # one budget for all ranks: it must fit the fullest
        if least[rank] > self.budget.bytes:
            raise CompileError(
                "QN213",
                f"stage rank {rank} saves {least[rank]} bytes at least, and the plan allows {self.budget.bytes}",
                fix=f"allow {1.00001 * least[rank] / 2**30:.6g} GiB, or use more microbatches",  # six digits round up
            )
        return recomputed

    def _moves(self, groups: Sequence[list[fx.Node]]) -> list[_Move]:
        """Return all blocks' moves from the fastest cut to the smallest, the best first."""
        moves = []
        for block, nodes in enumerate(groups):
            points = [(point, frozenset(nodes[i] for i in places)) for point, places in self._hull(nodes)]
            moves.append(_Move(-1.0, block, frozenset(), points[0][1]))
            for (a, a_nodes), (b, b_nodes) in pairwise(points):
                moves.append(_Move((b.seconds - a.seconds) / max(1, a.bytes - b.bytes), block, a_nodes, b_nodes))
        return sorted(moves, key=lambda move: (move.price, move.block))

    def _fewest(self, rank: int, stages: set[int], moves: Sequence[_Move]) -> Nodes:
        """Return the nodes that are recomputed after the fewest moves with which the rank fits."""

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
        """Return the cuts that are best for some price of a byte, from the fastest to the smallest.

        Each comes with the indices of its nodes, which are the same for equal blocks.
        """
        places = {node: place for place, node in enumerate(nodes)}
        key = tuple((str(n.target), _signature(n), tuple(places.get(s, -1) for s in n.all_input_nodes)) for n in nodes)
        if key not in self.hulls:
            fastest, smallest = (
                cheapest_cut(nodes, self.budget.seconds, price) for price in (MIN_BYTE_SECONDS, MAX_BYTE_SECONDS)
            )
            cuts = [fastest, *self._between(nodes, fastest, smallest), smallest]
            self.hulls[key] = [(point, frozenset(places[n] for n in point.again)) for point in cuts]
        return self.hulls[key]

    def _between(self, nodes: list[fx.Node], fast: RecomputeCut, small: RecomputeCut) -> list[RecomputeCut]:
        """Return the best cuts between two, by bisection of the price."""
        if small.bytes >= fast.bytes:
            return []
        price = (small.seconds - fast.seconds) / (fast.bytes - small.bytes)
        middle = cheapest_cut(nodes, self.budget.seconds, price)
        least = fast.seconds + price * fast.bytes
        if middle.seconds + price * middle.bytes >= least * (1 - 1e-6) or middle.bytes in (fast.bytes, small.bytes):
            return []
        return [*self._between(nodes, fast, middle), middle, *self._between(nodes, middle, small)]

    def _needs(self, rank: int, stages: set[int], again: Nodes) -> tuple[int, float]:
        """Return the bytes that the rank's schedule holds, and seconds of recomputing a microbatch on its stages."""
        saved: dict[int, set[fx.Node]] = {stage: set() for stage in stages}
        seconds, seen = 0.0, set[fx.Node]()
        for node in self.program.graph.nodes:
            home = self.program.stage.get(node)
            if home not in saved or facts(node).phase != "backward":
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
                    saved[home].add(memory)
        sizes = {stage: sum(map(_bytes, nodes)) for stage, nodes in saved.items()}
        return most_held(self.budget.schedule, lambda stage: sizes.get(stage, 0))[rank], seconds

    def _memory(self, node: fx.Node, stage: int) -> fx.Node:
        """Return the node that owns a node's memory on a stage; received values own theirs."""
        return memory_of(node) if self.program.stage.get(node) == stage else node

    def _saved(self, node: fx.Node, stage: int) -> bool:
        """Return whether memory stays on the device from a forward of ``stage`` to its backward.

        Batches, values that are computed once a step, and those that leave do not count.
        """
        if node.op != "call_function" or leaf(node) is not None or node in self.program.once:
            return False
        return node in self.program.stage and not any(leaves(stage, node) for leaves in self.budget.leaving)


def _signature(node: fx.Node) -> tuple[object, ...]:
    """Return the shapes and dtypes of a node's values, and whether a backward reads them."""
    types = tuple((tuple(x.shape), x.dtype) for x in values(node) if isinstance(x, Tensor))
    return types, any(user.op == "call_function" and facts(user).phase == "backward" for user in node.users)


def _bytes(node: fx.Node) -> int:
    return sum(num_bytes(x) for x in values(node) if isinstance(x, Tensor))
