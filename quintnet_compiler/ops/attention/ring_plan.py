"""Which runs of positions each rank of a ring computes attention for, so that all have equally much to compute."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..define import define_operator
from .blocks import FEWEST, Block, Sight
from .tiles import Ids

RUNS = (8, 4, 2, 1)  # of a rank: as many as divide its positions, and are not short
EVEN = 1.02  # the most work of a rank over the mean that is even enough

Held = Sequence[Sequence[int]]  # by rank, numbers of runs
Runs = list[tuple[int, int]]  # first position and length of each


def runs_of_rank(length: int) -> int:
    """Return the number of runs into which the ``length`` positions of a rank are cut.

    >>> [runs_of_rank(length) for length in (7, 6, 1020, 1024, 4096)]
    [1, 2, 2, 4, 8]
    """
    return next(runs for runs in RUNS if length % runs == 0 and (runs <= 2 or length // runs >= FEWEST))


def assign_runs(work: Sequence[float], ranks: int) -> list[list[int]]:
    """Assign equally many runs to each of ``ranks``, by the ``work`` of each run in the order of positions.

    Runs stay where they are if that is even. Causality alone is, if each rank has half of its runs near the beginning
    and the others as far from the end (Brandon et al. 2023). From the better of the two, the rank that has most changes
    a run for a lighter one of another rank, by which both are left with least, until work is even or nothing helps.

    >>> assign_runs([1, 1, 1, 1], 2), assign_runs([1, 3, 5, 7], 2), assign_runs([1, 1, 6, 2, 2, 2], 3)
    ([[0, 1], [2, 3]], [[0, 3], [1, 2]], [[1, 2], [0, 3], [4, 5]])
    """
    count, enough = len(work) // ranks, EVEN * sum(work) / ranks
    starts = [[list(range(rank * count, (rank + 1) * count)) for rank in range(ranks)]]
    if count % 2 == 0:
        half, last = count // 2, len(work)
        firsts = [rank * count for rank in range(ranks)]
        starts += [[sorted([*range(at, at + half), *range(last - at - half, last - at)]) for at in firsts]]
    held = min(starts, key=lambda runs: max(_totals(work, runs)))
    totals = _totals(work, held)
    while (most := max(totals)) > enough:
        heavy = totals.index(most)
        changes = (
            (max(most - less, totals[rank] + less), rank, mine, theirs)
            for rank in range(ranks)
            for mine in held[heavy]
            for theirs in held[rank]
            if (less := work[mine] - work[theirs]) > 0
        )
        left, rank, mine, theirs = min(changes, default=(most, heavy, 0, 0))
        if left >= most:
            break
        for owner, gone, come in ((heavy, mine, theirs), (rank, theirs, mine)):
            held[owner] = sorted({*held[owner], come} - {gone})
            totals[owner] += work[come] - work[gone]
    return held


def _totals(work: Sequence[float], held: Held) -> list[float]:
    return [sum(work[run] for run in runs) for runs in held]


def positions_of(held: Held, length: int) -> list[Runs]:
    """Return the positions that ranks hold, whose runs have ``length`` each: neighbours are one.

    >>> positions_of([[0, 3], [1, 2]], 4)
    [[(0, 4), (12, 4)], [(4, 8)]]
    """
    return [list(_joined(runs, length)) for runs in held]


def _joined(runs: Sequence[int], length: int) -> Iterator[tuple[int, int]]:
    firsts = [run for run in runs if run - 1 not in runs]
    for first in firsts:
        end = next(run for run in range(first + 1, runs[-1] + 2) if run not in runs)
        yield first * length, (end - first) * length


def _shape(padding: object, segments: object, groups: object, mask: str, whole: int, ranks: int, runs: int) -> Tensor:
    return torch.empty([ranks, runs], dtype=torch.int64, device="cpu")


def _plan(
    padding: Tensor | None, segments: Tensor | None, groups: Tensor | None, mask: str, whole: int, ranks: int, runs: int
) -> Tensor:
    ids, sight, count = Ids(padding, segments, groups), Sight.parse(mask), whole // (ranks * runs)
    work = [ids.computed_pairs(sight, Block(run * count, count, 0, whole)) for run in range(ranks * runs)]
    return torch.tensor(assign_runs(work, ranks))


# By rank of a ring, the numbers of the ``runs`` of positions that it computes attention for, on the host: of all
# ``ranks * runs`` equal runs into which ``whole`` positions are cut. Ids of positions [B, T] are in the host's memory,
# the same on all ranks, and so is what follows from them. One plan is for all rows of the batch: by the sum of their
# work.
ring_plan = define_operator(
    "ring_plan(Tensor? padding, Tensor? segments, Tensor? groups, str mask, int whole, int ranks, int runs) -> Tensor",
    _shape,
    _plan,
)
