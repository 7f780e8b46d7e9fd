"""What any run of a graph's operators would take as a pipeline stage, and what would travel between two of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import fx

from ...compat.torch import schema
from ...core.annotations import Leaf, leaf, needs_grad, num_bytes, origin, tensor_inputs, values
from ...core.sharding import AxisType, I, Shard, Sharding, gradient
from ...ir.cost_protocol import CostModel
from ...ir.program import ShardedProgram
from ...ops.collectives import lower_conversion, share
from ...schedules.synthesis import StageTimes
from .partition import Array

Places = NDArray[np.int64]  # positions among the operators

EMPTY = 1e3  # seconds: what a stage without parameters costs
MOST_PLACES = 400  # up to this many operators every cut is tried; beyond, the narrowest of each run of operators


class StageLoads:
    """Of one microbatch on one rank, for the operators ``order``. A stage may begin at ``places``.

    ``forward``, ``input``, ``weight``: seconds of all operators before a place, and of the halves of their backwards,
    with the collectives that bring their inputs.
    ``sends[way]``: seconds on the wire of what crosses a place, forward and backward. ``reads``: how many operators
    before a place read parameters.
    """

    def __init__(self, program: ShardedProgram, order: Sequence[fx.Node], cost: CostModel) -> None:
        self.count = len(order)
        place = {node: index for index, node in enumerate(order)}
        times = np.array([_run(program, node, cost) for node in order])
        for node, (forward, backward) in collectives(program, order, cost).items():
            times[place[node], :2] += forward, backward
        trained = [any(found is not None and found.kind == "parameter" for found in map(_source, tensor_inputs(node)))
                   for node in order]  # fmt: skip
        self.reads = np.concatenate([[0], np.cumsum(trained)])
        crossing = np.zeros(self.count + 1)
        self.sends = np.zeros((2, self.count + 1))
        apart = math.prod(axis.size for axis in program.axes if axis.role != "time")  # neighbours along pp
        for (node, output), uses in _uses(order, place).items():
            size = num_bytes(values(node)[output]) * _left(program, program.produced(node, output))
            across = slice(place[node] + 1, uses[-1] + 1)
            crossing[across] += size
            way = cost.send_seconds(size, apart)
            self.sends[0, across] += way
            if needs_grad(node):
                self.sends[1, across] += way
                times[place[node], 1] += (len(uses) - 1) * cost.accumulate_seconds(size)  # gradients of all uses
        self.forward, self.input, self.weight = (np.concatenate([[0.0], np.cumsum(one)]) for one in times.T)
        self.places = _narrow_places(crossing)

    def empty(self, first: Places, last: Places) -> NDArray[np.bool_]:
        """Whether stages that begin and end at these places have no parameters."""
        found: NDArray[np.bool_] = self.reads[first] == self.reads[last]
        return found


def operator_times(program: ShardedProgram, node: fx.Node, cost: CostModel) -> StageTimes:
    """One microbatch of one rank's share of an operator."""
    reads = [num_bytes(values(made)[output]) * _left(program, program.wanted(node, position))
             for position, (made, output) in enumerate(map(origin, tensor_inputs(node)))]  # fmt: skip
    writes = [num_bytes(value) * _left(program, program.produced(node, output))
              for output, value in enumerate(values(node))]  # fmt: skip
    ways = [a.size for a, s in zip(program.axes, program.strategies[node], strict=True) if s.splits]
    return cost.run_seconds(node, 1 / math.prod(ways), reads, sum(writes))


def collectives(
    program: ShardedProgram, order: Sequence[fx.Node], cost: CostModel
) -> dict[fx.Node, tuple[float, float]]:
    """Seconds that each operator waits for collectives on what it reads, and its backward on the gradients of that;
    each value is brought into a sharding once, for the first that reads it so. What parameters and what moves whole
    batches take is not counted."""
    found: dict[fx.Node, tuple[float, float]] = {}
    known: set[tuple[fx.Node, int, Sharding]] = set()
    for node in order:
        there = back = 0.0
        for position, (made, output) in enumerate(map(origin, tensor_inputs(node))):
            kinds, wanted = program.produced(made, output), program.wanted(node, position)
            if leaf(made) is not None or kinds == wanted or (made, output, wanted) in known:
                continue
            known.add((made, output, wanted))
            size, grad = num_bytes(values(made)[output]), needs_grad(made)
            for at, axis in enumerate(program.axes):
                if axis.role == "time" or kinds[at] == wanted[at]:
                    continue
                others = size * _left(program, tuple(I if i == at else kind for i, kind in enumerate(kinds)))
                there += _moved(kinds[at], wanted[at], others, axis.size, cost)
                back += _moved(gradient(wanted[at]), gradient(kinds[at]), others, axis.size, cost) if grad else 0.0
        if there or back:
            found[node] = there, back
    return found


def _moved(a: AxisType, b: AxisType, size: float, ranks: int, cost: CostModel) -> float:
    op, _ = lower_conversion(a, b)
    name = "" if op is None or op is share else str(schema(op).name).partition("::")[2]
    return 0.0 if not name or name.startswith("shard_") else cost.meeting_seconds(name, size, ranks)


def _run(program: ShardedProgram, node: fx.Node, cost: CostModel) -> tuple[float, float, float]:
    times = operator_times(program, node, cost)
    return times.forward, times.input, times.weight


def _source(node: fx.Node) -> Leaf | None:
    return leaf(origin(node)[0])


def _uses(order: Sequence[fx.Node], place: dict[fx.Node, int]) -> dict[tuple[fx.Node, int], list[int]]:
    """Where each value that an operator makes is read."""
    found: dict[tuple[fx.Node, int], list[int]] = defaultdict(list)
    for node in order:
        for source in dict.fromkeys(origin(given) for given in tensor_inputs(node)):
            if source[0] in place:
                found[source].append(place[node])
    return found


def _left(program: ShardedProgram, kinds: Sharding) -> float:
    """A rank's share of a value."""
    split = [axis.size for axis, kind in zip(program.axes, kinds, strict=True) if isinstance(kind, Shard)]
    return 1 / math.prod(split)


def _narrow_places(crossing: Array) -> list[int]:
    """Positions to cut at: all, or the narrowest of each run of operators."""
    inner = range(1, len(crossing) - 1)
    if len(inner) <= MOST_PLACES:
        return [0, *inner, len(crossing) - 1]
    run = math.ceil(len(inner) / MOST_PLACES)
    chosen = [min(inner[i : i + run], key=lambda p: (crossing[p], p)) for i in range(0, len(inner), run)]
    return [0, *chosen, len(crossing) - 1]
