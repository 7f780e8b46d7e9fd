"""Definitions of recurrent operators, beside torch's kernels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quintnet_compiler.passes.frontend.recurrent_layers import RECURRENT

X = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
KINDS = {
    torch.ops.aten.lstm.input: nn.LSTM,
    torch.ops.aten.gru.input: nn.GRU,
    torch.ops.aten.rnn_tanh.input: nn.RNN,
}


@pytest.mark.parametrize("dropout", [0.0, 1.0])
@pytest.mark.parametrize("target", KINDS, ids=str)
def test_as_torch_computes_it(target: torch._ops.OpOverload, dropout: float) -> None:
    """Dropout with probability 1 draws nothing, and leaves zeros between layers."""
    layer = KINDS[target](4, 5, 2, dropout=dropout, bidirectional=True, batch_first=True).double()
    state = torch.randn(4, 2, 5, dtype=torch.float64)
    states = [state, state + 1] if target is torch.ops.aten.lstm.input else state
    arguments = X, states, list(layer.parameters()), True, 2, dropout, True, True, True
    for ours, theirs in zip(RECURRENT[target](*arguments), target(*arguments), strict=True):
        torch.testing.assert_close(ours, theirs)
