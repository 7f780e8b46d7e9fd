"""What any run of a graph's operators would take as a pipeline stage, and what would travel between two of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import fx

from ...core.annotations import Leaf, leaf, needs_grad, num_bytes, origin, tensor_inputs, values
from ...core.sharding import Shard, Sharding
from ...ir.cost_protocol import CostModel
from ...ir.program import ShardedProgram
from ...schedules.synthesis import StageTimes
from .partition import Array

Places = NDArray[np.int64]  # positions among the operators

EMPTY = 1e3  # seconds: what a stage without parameters costs
MOST_PLACES = 400  # up to this many operators every cut is tried; beyond, the narrowest of each run of operators


class StageLoads:
    """Of one microbatch on one rank, for the operators ``order``. A stage may begin at ``places``.

    ``forward``, ``input``, ``weight``: seconds of all operators before a place, and of the halves of their backwards.
    ``sends[way]``: seconds on the wire of what crosses a place, forward and backward. ``reads``: how many operators
    before a place read parameters.
    """

    def __init__(self, program: ShardedProgram, order: Sequence[fx.Node], cost: CostModel) -> None:
        self.count = len(order)
        place = {node: index for index, node in enumerate(order)}
        times = np.array([_run(program, node, cost) for node in order])
        trained = [any(found is not None and found.kind == "parameter" for found in map(_source, tensor_inputs(node)))
                   for node in order]  # fmt: skip
        self.reads = np.concatenate([[0], np.cumsum(trained)])
        crossing = np.zeros(self.count + 1)
        self.sends = np.zeros((2, self.count + 1))
        for (node, output), uses in _uses(order, place).items():
            size = num_bytes(values(node)[output]) * _left(program, program.produced(node, output))
            across = slice(place[node] + 1, uses[-1] + 1)
            crossing[across] += size
            self.sends[0, across] += cost.send_seconds(size)
            if needs_grad(node):
                self.sends[1, across] += cost.send_seconds(size)
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
