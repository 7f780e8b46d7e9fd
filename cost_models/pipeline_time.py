"""Time of a pipeline of uneven stages: an exact recurrence for 1F1B, the closed form for the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """One microbatch on one stage, in seconds."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


def one_f_one_b_seconds(stages: Sequence[Stage], microbatches: int, send: float = 0.0) -> float:
    """When the last backward ends: each stage runs its 1F1B order, each action as soon as its inputs are there.

    ``send``: seconds from a stage to its neighbour, during which neither computes.

    >>> one_f_one_b_seconds([Stage(1, 2)] * 4, 8)  # (m + p - 1) (f + b)
    33.0
    """
    depth = len(stages)
    orders = []
    for rank in range(depth):
        warm = min(depth - rank - 1, microbatches)
        order = [("F", i) for i in range(warm)]
        for i in range(microbatches - warm):
            order += [("F", warm + i), ("B", i)]
        order += [("B", i) for i in range(microbatches - warm, microbatches)]
        orders.append(order)
    ends: dict[tuple[str, int, int], float] = {}
    free, at = [0.0] * depth, [0] * depth
    left = sum(map(len, orders))
    while left:
        for rank in range(depth):
            while at[rank] < len(orders[rank]):
                kind, i = orders[rank][at[rank]]
                source = rank - 1 if kind == "F" else rank + 1
                if kind == "B" and rank == depth - 1:
                    ready: float | None = 0.0
                else:
                    ready = ends.get((kind, i, source)) if 0 <= source < depth else 0.0
                if ready is None:
                    break
                seconds = stages[rank].forward if kind == "F" else stages[rank].backward
                moved = send if 0 <= source < depth else 0.0
                free[rank] = max(free[rank], ready) + moved + seconds
                ends[kind, i, rank] = free[rank]
                at[rank] += 1
                left -= 1
    return max(free)


def interleaved_seconds(stages: Sequence[Stage], microbatches: int, chunks: int, send: float = 0.0) -> float:
    """Megatron's interleaved 1F1B (Narayanan et al. 2021): the bubble is that of stages ``chunks`` times thinner.

    ``stages``: per rank, all its chunks together; the slowest one sets the pace.

    >>> interleaved_seconds([Stage(2, 4)] * 4, 8, 2)  # m (f + b) + (p - 1) (f + b) / v
    57.0
    """
    slowest = max(stage.both for stage in stages)
    others = (sum(stage.both for stage in stages) - slowest) / chunks
    return microbatches * (slowest + 2 * chunks * send) + others + 2 * (len(stages) - 1) * send
