"""The CTC loss of each row as an operator whose results have known shapes.

torch's own keeps a table of as many columns as the longest target has labels, twice, which a trace cannot know. Here it
has as many as the padded targets. Targets that are one after the other, as Hugging Face models have them, are padded
again: :func:`masked_select` and :func:`total` leave a note on their results of what they are made of.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..compat.torch import version
from ..compat.torch_codegen import SHIPPED
from .define import define_operator, differentiate

aten = torch.ops.aten
_PADDED = "quintnet_padded"  # of what a mask selects: the mask, and the selected values of each row
_COUNTED = "quintnet_counted"  # of counts of each row of a mask: the mask


def _wide(targets: Tensor) -> int:
    return 2 * targets.shape[1] + 1


def _empty(log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int, zero: bool) -> Any:
    steps, rows = log_probs.shape[:2]
    return log_probs.new_empty([rows]), log_probs.new_empty([rows, steps, _wide(targets)])


def _losses(log_probs: Tensor, targets: Tensor, inputs: Tensor, lengths: Tensor, blank: int, zero: bool) -> Any:
    losses, table = aten._ctc_loss.Tensor(log_probs, targets, inputs, lengths, blank, zero)
    table = F.pad(table, (0, _wide(targets) - table.shape[2]), value=-torch.inf)
    step, place = (SHIPPED.arange(size, device=table.device) for size in table.shape[1:])
    inputs, lengths = inputs.to(table.device), lengths.to(table.device)
    read = (step < inputs[:, None])[:, :, None] & (place < 2 * lengths[:, None] + 1)[:, None]
    return losses, SHIPPED.where(read, table, -torch.inf)  # torch's own leaves the rest as it was in memory


def _gradient(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    inputs: Tensor,
    lengths: Tensor,
    losses: Tensor,
    table: Tensor,
    blank: int,
    zero: bool,
) -> Tensor:
    forward = (log_probs, targets, inputs, lengths, losses, table, blank, zero)  # its inputs and results
    gradient: Tensor = aten._ctc_loss_backward.Tensor(grad.contiguous(), *forward)
    return gradient


# of log-probabilities [steps, rows, classes] and targets [rows, labels], the loss of each row; and a table for backward
ctc_rows = define_operator(
    "ctc_rows(Tensor log_probs, Tensor targets, Tensor inputs, Tensor lengths, int blank, bool zero)"
    " -> (Tensor, Tensor)",
    _empty,
    _losses,
)
ctc_rows_backward = define_operator(
    "ctc_rows_backward(Tensor grad, Tensor log_probs, Tensor targets, Tensor inputs, Tensor lengths, Tensor losses, "
    "Tensor table, int blank, bool zero) -> Tensor",
    lambda grad, log_probs, *rest: SHIPPED.empty_like(log_probs),
    _gradient,
)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.mark_non_differentiable(output[1])
    ctx.options = inputs[4:]


def _backward(ctx: Any, grad: Tensor, _table: Tensor) -> Any:
    return ctc_rows_backward(grad, *ctx.saved_tensors, *ctx.options), None, None, None, None, None


differentiate(ctc_rows, _keep, _backward)


def masked_select(*args: Any, **kwargs: Any) -> Tensor:
    """Compute torch.masked_select; if values and mask are [rows, length], note on the result what each row selects."""
    selected: Tensor = torch.masked_select(*args, **kwargs)
    x, mask = (*args, *kwargs.values())[:2]
    if x.dim() == 2 and str(x.shape) == str(mask.shape) and not x.requires_grad:
        place = SHIPPED.where(mask, mask.cumsum(1) - 1, x.shape[1])  # what is not selected goes behind the last column
        wide = x.new_zeros(x.shape[0], x.shape[1] + 1).scatter(1, place, x)
        setattr(selected, _PADDED, (mask, version(mask), wide[:, :-1]))
    return selected


def total(*args: Any, **kwargs: Any) -> Tensor:
    """Compute torch.sum; note on counts of each row of a mask [rows, length] which mask they are of."""
    sums: Tensor = SHIPPED.sum(*args, **kwargs)
    x, *dims = (*args, *kwargs.values())
    if x.dtype is torch.bool and x.dim() == 2 and dims in ([-1], [1]):
        setattr(sums, _COUNTED, (x, version(x)))
    return sums


def _padded(targets: Tensor, lengths: Any) -> Tensor | None:
    """Return concatenated targets as [rows, labels], if the lengths are certain to be those of the rows; else None."""
    *selected, padded = getattr(targets, _PADDED, (None, None, None))
    counted = getattr(lengths, _COUNTED, None)
    if counted is None or selected[0] is not counted[0] or selected[1] != counted[1]:
        return None
    return padded


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Compute F.ctc_loss, by :data:`ctc_rows` if targets are padded, or have been; a sample without rows is one row."""
    targets = targets if (padded := _padded(targets, target_lengths)) is None else padded
    input_lengths, target_lengths = (
        x if isinstance(x, Tensor) else torch.tensor(x, dtype=torch.long) for x in (input_lengths, target_lengths)
    )
    if log_probs.dim() == 2:
        rows = targets.unsqueeze(0), input_lengths.reshape(1), target_lengths.reshape(1)
        loss = ctc_loss(log_probs.unsqueeze(1), *rows, blank, reduction, zero_infinity)
        return loss.squeeze(0) if reduction == "none" else loss
    if targets.dim() != 2:
        whole: Tensor = F.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
        return whole
    losses: Tensor = ctc_rows(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)[0]
    if zero_infinity:
        losses = SHIPPED.where(losses == torch.inf, 0.0, losses)
    if reduction == "mean":
        losses = (losses / target_lengths.clamp(min=1).to(losses.dtype)).mean()
    if reduction == "sum":
        losses = losses.sum()
    return losses
