"""loss_total: what it adds is what the program evaluated."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import quintnet
from quintnet_compiler.api.loss_total import LossTotal


def test_batches_of_other_sizes_count_by_their_rows() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    x, y = torch.randn(12, 4), torch.randn(12, 2)
    program = quintnet.compile(model, quintnet.Mesh(dp=2), (x[:4], y[:4]), loss_fn=F.mse_loss)
    total = program.loss_total()
    assert isinstance(total, LossTotal)
    total.add((x[:4], y[:4]))
    total.add((x[4:], y[4:]))
    torch.testing.assert_close(total.loss(), F.mse_loss(model(x), y).double(), check_dtype=False)
