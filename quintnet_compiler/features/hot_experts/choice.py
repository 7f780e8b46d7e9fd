"""Choose hot experts from the numbers of rows that experts get."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class HotExperts:
    """Decisions of a plan about a mixture, and what it expects of all mixtures.

    Attributes:
        experts: for the option ``hot_experts``, for parameters of the mixture.
        hot_rows: for the option ``expect``: the share of rows that stay.
        expert_imbalance: for the option ``expect``: rows of the rank with most of them, over their average.
    """

    experts: tuple[int, ...]
    hot_rows: float
    expert_imbalance: float


def hot_experts(load: Sequence[int] | Tensor, ranks: int, *, row_bytes: int, expert_bytes: int) -> HotExperts:
    """Choose the experts that are worth a copy on every rank: with these, fewest bytes pass through the busiest rank.

    A row travels four times: there and back, forward and backward. Weights are added up over ranks twice, of all and
    of their gradients, which is as much as four times their bytes, once a microbatch. So an expert is worth it where
    the rows that the busiest rank no longer gets have more bytes than its weights. Each time the expert with most rows
    of the rank with most of them is tried: no other set of so many experts leaves the busiest rank fewer.

    Args:
        load: how many rows each expert gets in a microbatch, from all ranks over which experts are spread.
        ranks: over how many these are.
        row_bytes: of a row that travels: features times bytes of a number.
        expert_bytes: of all weights of an expert.

    Raises:
        ValueError: for loads that are no numbers of rows.

    >>> hot_experts([90, 2, 4, 4], 2, row_bytes=128, expert_bytes=4096)
    HotExperts(experts=(0,), hot_rows=0.9, expert_imbalance=1.06)
    """
    rows = [int(n) for n in load]
    if min(rows, default=-1) < 0 or ranks < 1:
        raise ValueError(f"{rows} are not numbers of rows, one for each expert, over {ranks} ranks")
    own = -(-len(rows) // ranks)
    left = [
        sorted(range(first, min(first + own, len(rows))), key=rows.__getitem__) for first in range(0, len(rows), own)
    ]
    picked = list[int]()
    choices = list[tuple[int, tuple[int, ...], int]]()
    while True:
        most = max(left, key=lambda experts: sum(rows[e] for e in experts))
        busiest = sum(rows[e] for e in most)
        choices.append((row_bytes * busiest + expert_bytes * len(picked), tuple(sorted(picked)), busiest))
        if not most:
            break
        picked.append(most.pop())
    _, hot, busiest = min(choices)
    stays, total = sum(rows[e] for e in hot), sum(rows) or 1
    return HotExperts(hot, stays / total, max(1.0, (busiest * ranks + stays) / total))
