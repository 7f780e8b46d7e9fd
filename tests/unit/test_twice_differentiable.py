"""Losses of labels that are written out: the same values and gradients, and those of gradients."""

from __future__ import annotations

import torch

from quintnet_compiler.ops.cross_entropy import row_nll
from quintnet_compiler.passes.frontend import twice_differentiable

LOGITS = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
LABELS = torch.tensor([0, 2, -100, 1, 1])
WEIGHT = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)


def test_as_the_operators_compute_it() -> None:
    table = twice_differentiable.TWICE_DIFFERENTIABLE
    torch.testing.assert_close(table[row_nll](LOGITS, LABELS, -100), row_nll(LOGITS, LABELS, -100))
    operator = torch.ops.aten.nll_loss_forward.default
    for weight in (None, WEIGHT):
        ours, theirs = (f(LOGITS, LABELS, weight, 0, -100)[0] for f in (table[operator], operator))
        torch.testing.assert_close(ours, theirs)


def test_its_gradients_have_gradients() -> None:
    logits = LOGITS.clone().requires_grad_()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return twice_differentiable.label_losses(x.log_softmax(1), LABELS, WEIGHT, -100).sum()

    assert torch.autograd.gradgradcheck(loss, (logits,))
