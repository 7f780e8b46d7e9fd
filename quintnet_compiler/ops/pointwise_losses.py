"""Gradients of losses, written so that compilers fuse them with their neighbours."""

from __future__ import annotations

from torch import Tensor

from ..compat.torch_codegen import SHIPPED

MEAN = 1  # torch's number for reduction="mean"


def nll_loss_backward(
    grad: Tensor, x: Tensor, labels: Tensor, weight: Tensor | None, reduction: int, ignore_index: int, total: Tensor
) -> Tensor:
    """Return the gradient of :func:`torch.nn.functional.nll_loss` as a pointwise expression.

    torch's own decomposition writes zeros [N, C], scatters into them and multiplies them: three passes over memory.

    Args:
        grad: of the loss: [], or [N] if it is not reduced.
        x: log-probabilities [N, C] or [C], of which only the shape, dtype and device matter.
        labels: classes [N] or [].
        weight: of classes [C].
        reduction: 0 (none), 1 (mean) or 2 (sum).
        ignore_index: a class whose rows have no gradient.
        total: the sum of the weights of all rows' classes [].

    Returns:
        The gradient, of the shape of ``x``, contiguous.
    """
    if reduction == MEAN:
        grad = grad / total
    if x.dim() == 1 and labels.dim():
        labels = labels[0]
    labels = labels.unsqueeze(-1)
    if 0 < grad.dim() < x.dim():
        grad = grad.unsqueeze(-1)
    if weight is not None:
        grad = grad * weight
    is_class = SHIPPED.arange(x.shape[-1], device=x.device) == labels
    return SHIPPED.where(is_class & (labels != ignore_index), -grad, 0).to(x.dtype)
