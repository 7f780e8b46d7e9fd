"""A linear layer for mixtures of experts, to be used in models."""

from __future__ import annotations

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
    out: Tensor = expert_ops.expert_linear(rows, ids, weight, bias, transposed)
    return out
