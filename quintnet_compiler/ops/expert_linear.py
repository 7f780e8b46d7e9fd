"""Mixtures of experts as operators: a linear layer in which each row of the input has a weight of its own choice.

Rows stay in the model's own order, so that every value is that of the unsplit model; what sorts rows by expert is
inside the operators. An id outside the weight's experts gives a row of zeros: the row is another rank's.

Shapes: rows [N, I], ids [N], weight [E, O, I] (``transposed``: [E, I, O]), bias [E, O].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .define import define_operator

aten = torch.ops.aten


def _sorted(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, list[int]]:
    """The rows of known experts in the order of their experts, their experts, and how many each has."""
    mine = ((ids >= 0) & (ids < experts)).nonzero().squeeze(1)
    order = mine[torch.argsort(ids[mine], stable=True)]
    chosen = ids[order]
    return order, chosen, torch.bincount(chosen, minlength=experts).tolist()


def _runs(counts: list[int]) -> Iterator[tuple[int, slice]]:
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count


def _grouped(rows: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
    """``rows`` in the order of their experts times [E, I, O]."""
    if rows.is_cuda and rows.dtype == torch.bfloat16 and not any(n * 2 % 16 for n in weight.shape[1:]):
        ends = torch.tensor(counts, device=rows.device).cumsum(0, dtype=torch.int32)
        made: Tensor = aten._grouped_mm.default(rows, weight, ends)
        return made
    out = rows.new_empty([rows.shape[0], weight.shape[2]])
    for expert, run in _runs(counts):
        torch.mm(rows[run], weight[expert], out=out[run])
    return out


def _expert_linear(rows: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    order, chosen, counts = _sorted(ids, weight.shape[0])
    made = _grouped(rows[order], weight if transposed else weight.transpose(1, 2), counts)
    if bias is not None:
        made += bias[chosen]
    return rows.new_zeros([rows.shape[0], made.shape[1]]).index_copy_(0, order, made)


def _expert_weight_grad(grad: Tensor, rows: Tensor, ids: Tensor, experts: int, transposed: bool) -> Tensor:
    order, _, counts = _sorted(ids, experts)
    left, right = (rows[order], grad[order]) if transposed else (grad[order], rows[order])
    found = rows.new_zeros([experts, left.shape[1], right.shape[1]])
    for expert, run in _runs(counts):
        torch.mm(left[run].t(), right[run], out=found[expert])
    return found


def _expert_bias_grad(grad: Tensor, ids: Tensor, experts: int) -> Tensor:
    order, chosen, _ = _sorted(ids, experts)
    return grad.new_zeros([experts, grad.shape[1]]).index_add_(0, chosen, grad[order])


def _features(weight: Tensor, transposed: bool) -> int:
    return weight.shape[2 if transposed else 1]


expert_linear = define_operator(
    "expert_linear(Tensor rows, Tensor ids, Tensor weight, Tensor? bias, bool transposed) -> Tensor",
    lambda rows, ids, weight, bias, transposed: rows.new_empty([rows.shape[0], _features(weight, transposed)]),
    _expert_linear,
)
expert_weight_grad = define_operator(
    "expert_weight_grad(Tensor grad, Tensor rows, Tensor ids, int experts, bool transposed) -> Tensor",
    lambda grad, rows, ids, experts, transposed: rows.new_empty(
        [experts, *((rows.shape[1], grad.shape[1]) if transposed else (grad.shape[1], rows.shape[1]))]
    ),
    _expert_weight_grad,
)
expert_bias_grad = define_operator(
    "expert_bias_grad(Tensor grad, Tensor ids, int experts) -> Tensor",
    lambda grad, ids, experts: grad.new_empty([experts, grad.shape[1]]),
    _expert_bias_grad,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, ids, weight, bias, transposed = inputs
    ctx.save_for_backward(rows, ids, weight)
    ctx.transposed, ctx.biased = transposed, bias is not None


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, ids, weight = ctx.saved_tensors
    wanted, experts = ctx.needs_input_grad, weight.shape[0]
    return (
        expert_linear(grad, ids, weight, None, not ctx.transposed) if wanted[0] else None,
        None,
        expert_weight_grad(grad, rows, ids, experts, ctx.transposed) if wanted[2] else None,
        expert_bias_grad(grad, ids, experts) if ctx.biased and wanted[3] else None,
        None,
    )


# for models that call it themselves, unsplit
torch.library.register_autograd("quintnet::expert_linear", _backward, setup_context=_keep)
