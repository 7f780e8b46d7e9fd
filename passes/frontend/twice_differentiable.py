"""Losses of labels as operators whose derivatives autograd can differentiate again, for gradients inside forward.

The derivative of ``nll_loss`` is an operator that autograd can differentiate only together with the loss; in a program,
each operator is differentiated by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...ops.cross_entropy import row_nll

aten = torch.ops.aten


def label_losses(logp: Tensor, labels: Tensor, weight: Tensor | None, ignore: int) -> Tensor:
    """Return the loss of each row [rows] of log-probabilities [rows, classes]; 0 for the label ``ignore``."""
    valid = labels != ignore
    chosen = torch.where(valid, labels, 0).unsqueeze(1)
    losses = -logp.gather(1, chosen).squeeze(1)
    if weight is not None:
        losses = losses * weight.unsqueeze(0).expand_as(logp).gather(1, chosen).squeeze(1)
    return torch.where(valid, losses, 0.0)


def _of_logits(logits: Tensor, labels: Tensor, ignore: int) -> Tensor:
    return label_losses(logits.log_softmax(-1), labels, None, ignore)


def _of_logarithms(
    logp: Tensor, labels: Tensor, weight: Tensor | None, reduction: int, ignore: int
) -> tuple[Tensor, Tensor]:
    """Return row losses without a reduction, the only form in programs; the second result is never read."""
    assert reduction == 0
    return label_losses(logp, labels, weight, ignore), logp.new_zeros(())


# an operator of a normalized graph, and what computes the same
TWICE_DIFFERENTIABLE: Mapping[Any, Callable[..., Any]] = MappingProxyType(
    {row_nll: _of_logits, aten.nll_loss_forward.default: _of_logarithms}
)
