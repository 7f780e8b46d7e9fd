"""A linear layer for mixtures of experts, to be used in models; and which experts are worth a copy on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..ops.experts import expert_linear as expert_ops


def expert_linear(
    rows: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False
) -> Tensor:
    """Return ``rows[n] @ weight[ids[n]].T + bias[ids[n]]`` for every row: a mixture of experts in one operator.

    On one device it groups rows by expert. Compiled, it is what spreads experts over ranks: rows travel to the ranks
    of their experts, and none is dropped.

    Args:
        rows: [N, I].
        ids: [N], integers: the expert of each row.
        weight: [E, O, I]; with ``transposed`` [E, I, O].
        bias: [E, O].

    Returns:
        [N, O]

    Raises:
        ValueError: if the shapes do not fit.

    >>> import torch
    >>> weight, ids = torch.stack([torch.eye(2), 3 * torch.eye(2)]), torch.tensor([1, 0, 1])
    >>> expert_linear(torch.ones(3, 2), ids, weight)[:, 0]
    tensor([3., 1., 3.])
    """
    outside, inside = (2, 1) if transposed else (1, 2)
    fits = rows.dim() == 2 and weight.dim() == 3 and ids.shape == rows.shape[:1]
    if not fits or weight.shape[inside] != rows.shape[1]:
        raise ValueError(
            f"rows {tuple(rows.shape)}, ids {tuple(ids.shape)} and weight {tuple(weight.shape)} do not fit: "
            f"[N, I], [N] and {'[E, I, O]' if transposed else '[E, O, I]'} are expected"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0], weight.shape[outside]):
        raise ValueError(f"bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}: [E, O] is expected")
    made: Tensor = expert_ops.expert_linear(rows, ids, weight, bias, transposed)
    return made


@dataclass(frozen=True)
class HotExperts:
    """Decisions of a plan about a mixture: the option ``hot_experts`` (for its parameters), and of all its
    mixtures ``hot_rows`` and ``expert_imbalance`` of the option ``expect``."""

    experts: tuple[int, ...]
    hot_rows: float
    expert_imbalance: float


def hot_experts(load: Sequence[int] | Tensor, ranks: int, *, row_bytes: int, expert_bytes: int) -> HotExperts:
    """Choose the experts that are worth a copy on every rank, so that fewest bytes pass through the busiest one.

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
    found = list[tuple[int, tuple[int, ...], int]]()
    while True:
        most = max(left, key=lambda experts: sum(rows[e] for e in experts))
        busiest = sum(rows[e] for e in most)
        found.append((row_bytes * busiest + expert_bytes * len(picked), tuple(sorted(picked)), busiest))
        if not most:
            break
        picked.append(most.pop())
    _, hot, busiest = min(found)
    stays, total = sum(rows[e] for e in hot), sum(rows) or 1
    return HotExperts(hot, stays / total, max(1.0, (busiest * ranks + stays) / total))
