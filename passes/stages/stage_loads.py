"""Times of any run of a graph's operators as a pipeline stage, and of sends between two stages."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import fx

from ...compat.torch import schema
from ...core.annotations import leaf, needs_grad, num_bytes, origin, tensor_inputs, values
from ...core.sharding import AxisType, I, Shard, Sharding, gradient
from ...ir.cost_protocol import CostModel
from ...ir.program import ShardedProgram
from ...ops.collectives import lower_conversion, share
from ...schedules.synthesis import StageTimes
from .partition import Array

Places = NDArray[np.int64]  # positions among the operators

EMPTY_STAGE_SECONDS = 1e3  # the penalty of a stage without parameters
MAX_PLACES = 400  # with more operators, a stage may begin only at the narrowest place of each run of operators


class StageLoads:
    """Loads of one microbatch on one rank, by place in the order of operators.

    Attributes:
        places: Where a stage may begin, and the end.
        forward: Seconds of the forward of all operators before a place, with the collectives on their inputs.
        input: The same for the half of the backward that computes gradients of inputs.
        weight: The same for the half that computes gradients of parameters.
        sends: [2, place]: seconds on the wire of the values that cross a place, forward and backward.
        reads: The number of operators before a place that read parameters.
    """

    def __init__(self, program: ShardedProgram, order: Sequence[fx.Node], cost: CostModel) -> None:
        self.count = len(order)
        place = {node: index for index, node in enumerate(order)}
        times = np.array([_run(program, node, cost) for node in order])
        for node, (forward, backward) in collectives(program, order, cost).items():
            times[place[node], :2] += forward, backward
        self.reads = np.concatenate([[0], np.cumsum([_reads_parameter(node) for node in order])])
        crossing = np.zeros(self.count + 1)
        self.sends = np.zeros((2, self.count + 1))
        distance = math.prod(axis.size for axis in program.axes if axis.role != "time")  # of neighbours along pp
        for (node, output), uses in _uses(order, place).items():
            size = num_bytes(values(node)[output]) * _rank_share(program, program.produced(node, output))
            across = slice(place[node] + 1, uses[-1] + 1)
            crossing[across] += size
            seconds = cost.send_seconds(size, distance)
            self.sends[0, across] += seconds
            if needs_grad(node):
                self.sends[1, across] += seconds
                times[place[node], 1] += (len(uses) - 1) * cost.accumulate_seconds(size)  # gradients of all uses
        self.forward, self.input, self.weight = (np.concatenate([[0.0], np.cumsum(column)]) for column in times.T)
        self.places = _narrow_places(crossing)

    def empty(self, first: Places, last: Places) -> NDArray[np.bool_]:
        """Return whether stages that begin and end at these places have no parameters."""
        without: NDArray[np.bool_] = self.reads[first] == self.reads[last]
        return without


def operator_times(program: ShardedProgram, node: fx.Node, cost: CostModel) -> StageTimes:
    """Return the times of one rank's share of an operator, for one microbatch."""
    reads = [
        num_bytes(values(source)[output]) * _rank_share(program, program.wanted(node, position))
        for position, (source, output) in enumerate(map(origin, tensor_inputs(node)))
    ]
    writes = [
        num_bytes(value) * _rank_share(program, program.produced(node, output))
        for output, value in enumerate(values(node))
    ]
    ways = [a.size for a, s in zip(program.axes, program.strategies[node], strict=True) if s.splits]
    return cost.run_seconds(node, 1 / math.prod(ways), reads, sum(writes))


def collectives(
    program: ShardedProgram, order: Sequence[fx.Node], cost: CostModel
) -> dict[fx.Node, tuple[float, float]]:
    """Return, by operator, the seconds of collectives on its inputs, and of those on their gradients in the backward.

    Each value is converted to a sharding once, for its first reader. Collectives on parameters, and those that move
    whole batches, do not count.
    """
    seconds: dict[fx.Node, tuple[float, float]] = {}
    converted: set[tuple[fx.Node, int, Sharding]] = set()
    for node in order:
        forward = backward = 0.0
        for position, (source, output) in enumerate(map(origin, tensor_inputs(node))):
            kinds, wanted = program.produced(source, output), program.wanted(node, position)
            if leaf(source) is not None or kinds == wanted or (source, output, wanted) in converted:
                continue
            converted.add((source, output, wanted))
            size, grad = num_bytes(values(source)[output]), needs_grad(source)
            for at, axis in enumerate(program.axes):
                if axis.role == "time" or kinds[at] == wanted[at]:
                    continue
                part = size * _rank_share(program, tuple(I if i == at else kind for i, kind in enumerate(kinds)))
                forward += _conversion_seconds(kinds[at], wanted[at], part, axis.size, cost)
                if grad:
                    a, b = gradient(wanted[at]), gradient(kinds[at])
                    backward += _conversion_seconds(a, b, part, axis.size, cost)
        if forward or backward:
            seconds[node] = forward, backward
    return seconds


def _conversion_seconds(a: AxisType, b: AxisType, size: float, ranks: int, cost: CostModel) -> float:
    """Return the seconds of the collective that converts ``a`` to ``b`` over an axis."""
    op, _ = lower_conversion(a, b)
    name = "" if op is None or op is share else str(schema(op).name).partition("::")[2]
    return 0.0 if not name or name.startswith("shard_") else cost.meeting_seconds(name, size, ranks)


def _run(program: ShardedProgram, node: fx.Node, cost: CostModel) -> tuple[float, float, float]:
    times = operator_times(program, node, cost)
    return times.forward, times.input, times.weight


def _reads_parameter(node: fx.Node) -> bool:
    leaves = (leaf(origin(source)[0]) for source in tensor_inputs(node))
    return any(source is not None and source.kind == "parameter" for source in leaves)


def _uses(order: Sequence[fx.Node], place: dict[fx.Node, int]) -> dict[tuple[fx.Node, int], list[int]]:
    """Return the places of the operators that read each value of an operator."""
    uses: dict[tuple[fx.Node, int], list[int]] = defaultdict(list)
    for node in order:
        for source in dict.fromkeys(map(origin, tensor_inputs(node))):
            if source[0] in place:
                uses[source].append(place[node])
    return uses


def _rank_share(program: ShardedProgram, kinds: Sharding) -> float:
    """Return a rank's share of a value."""
    split = [axis.size for axis, kind in zip(program.axes, kinds, strict=True) if isinstance(kind, Shard)]
    return 1 / math.prod(split)


def _narrow_places(crossing: Array) -> list[int]:
    """Return the places to cut at: all, or the narrowest of each run of operators."""
    inner = range(1, len(crossing) - 1)
    if len(inner) <= MAX_PLACES:
        return [0, *inner, len(crossing) - 1]
    run = math.ceil(len(inner) / MAX_PLACES)
    chosen = [min(inner[i : i + run], key=lambda p: (crossing[p], p)) for i in range(0, len(inner), run)]
    return [0, *chosen, len(crossing) - 1]
