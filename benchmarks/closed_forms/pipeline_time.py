"""Time of a pipeline of uneven stages: an exact recurrence for 1F1B, the closed form for the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """One microbatch on one stage, in seconds."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        """Return the seconds of forward and backward."""
        return self.forward + self.backward


def one_f_one_b_seconds(stages: Sequence[Stage], microbatches: int, send: float = 0.0) -> float:
    """Return when the last backward ends, if each stage runs its 1F1B order, each action as early as it can.

    ``send``: seconds from a stage to its neighbour, during which neither computes.

    >>> one_f_one_b_seconds([Stage(1, 2)] * 4, 8)  # (m + p - 1) (f + b)
    33.0
    """
    depth = len(stages)
    pending = [deque(_order(min(depth - rank - 1, microbatches), microbatches)) for rank in range(depth)]
    ends: dict[tuple[str, int, int], float] = {}  # by kind, microbatch and stage
    free = [0.0] * depth
    while any(pending):
        for rank, actions in enumerate(pending):
            while actions:
                kind, index = actions[0]
                source = rank - 1 if kind == "F" else rank + 1
                from_neighbour = 0 <= source < depth
                ready = ends.get((kind, index, source)) if from_neighbour else 0.0
                if ready is None:
                    break
                seconds = stages[rank].forward if kind == "F" else stages[rank].backward
                free[rank] = max(free[rank], ready) + (send if from_neighbour else 0.0) + seconds
                ends[kind, index, rank] = free[rank]
                actions.popleft()
    return max(free)


def _order(warmup: int, microbatches: int) -> Iterator[tuple[str, int]]:
    """Yield the actions of a rank: forwards, a forward and a backward in turn, then the other backwards."""
    for index in range(warmup):
        yield "F", index
    for index in range(microbatches - warmup):
        yield "F", warmup + index
        yield "B", index
    for index in range(microbatches - warmup, microbatches):
        yield "B", index


def interleaved_seconds(stages: Sequence[Stage], microbatches: int, chunks: int, send: float = 0.0) -> float:
    """Return the time of Megatron's interleaved 1F1B (Narayanan et al. 2021).

    The bubble is that of stages ``chunks`` times thinner. ``stages``: per rank, all its chunks together; the slowest
    one sets the pace.

    >>> interleaved_seconds([Stage(2, 4)] * 4, 8, 2)  # m (f + b) + (p - 1) (f + b) / v
    57.0
    """
    slowest = max(stage.both for stage in stages)
    others = (sum(stage.both for stage in stages) - slowest) / chunks
    return microbatches * (slowest + 2 * chunks * send) + others + 2 * (len(stages) - 1) * send
