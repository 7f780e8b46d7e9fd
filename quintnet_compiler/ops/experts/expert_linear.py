"""Mixtures of experts as an operator: a linear layer in which each row of the input has a weight of its own choice.

Rows stay in the model's own order, so that every value is that of the unsplit model. An id outside the weight's experts
gives a row of zeros: the row is another rank's. A rank's program has its parts in its place (:mod:`.grouped_rows`), so
that all layers of a mixture share one plan.

Shapes: rows [N, I], ids [N], weight [E, O, I] (``transposed``: [E, I, O]), bias [E, O].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..define import define_operator
from .grouped_rows import (
    group_plan,
    group_rows,
    grouped_bias_grad,
    grouped_linear,
    grouped_weight_grad,
    has_grouped_matmul,
    ungroup_rows,
)


def counts_on_host(rows: Tensor, weight: Tensor) -> bool:
    """Return whether products of these are loops over experts, whose numbers of rows the host has to know."""
    return not has_grouped_matmul(rows.device, rows.dtype, weight.shape[1:])


def _expert_linear(rows: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    order, ends = group_plan(ids, weight.shape[0], None, counts_on_host(rows, weight))
    products = grouped_linear(group_rows(rows, order, ends), ends, weight, bias, transposed)
    out: Tensor = ungroup_rows(products, order, ends)
    return out


expert_linear = define_operator(
    "expert_linear(Tensor rows, Tensor ids, Tensor weight, Tensor? bias, bool transposed) -> Tensor",
    lambda rows, ids, weight, bias, transposed: rows.new_empty([rows.shape[0], weight.shape[2 if transposed else 1]]),
    _expert_linear,
)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, ids, weight, bias, transposed = inputs
    ctx.save_for_backward(rows, ids, weight)
    ctx.transposed, ctx.biased = transposed, bias is not None


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    rows, ids, weight = ctx.saved_tensors
    wanted = ctx.needs_input_grad
    order, ends = group_plan(ids, weight.shape[0], None, counts_on_host(rows, weight))
    grad = group_rows(grad, order, ends)
    back = grouped_linear(grad, ends, weight, None, not ctx.transposed) if wanted[0] else None
    return (
        ungroup_rows(back, order, ends) if wanted[0] else None,
        None,
        grouped_weight_grad(grad, group_rows(rows, order, ends), ends, ctx.transposed) if wanted[2] else None,
        grouped_bias_grad(grad, ends) if ctx.biased and wanted[3] else None,
        None,
    )


# for models that call it themselves, unsplit
torch.library.register_autograd("quintnet::expert_linear", _backward, setup_context=_keep)
