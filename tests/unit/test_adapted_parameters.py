"""huggingface.adapted_parameters: a layer of experts beside whose weight there are adapters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quintnet_compiler.huggingface.adapted_parameters import AdaptedExperts, adapters_without_classes
from quintnet_compiler.ops.experts.expert_linear import expert_linear


@pytest.mark.parametrize("transposed", [False, True])
def test_a_layer_with_adapters_is_one_with_their_sum(transposed: bool) -> None:
    torch.manual_seed(0)
    module, rows, ids = nn.Module(), torch.randn(6, 4).double(), torch.tensor([0, 2, 1, 1, 0, 2])
    first, second = (4, 5) if transposed else (5, 4)
    module.weight = nn.Parameter(torch.randn(3, first, second).double())
    factors = [(torch.randn(3, first, r).double(), torch.randn(3, r, second).double(), 0.5 * r) for r in (1, 2)]
    found = AdaptedExperts("ours", {(module, "weight"): factors}).layer(module, "weight", rows, ids, None, transposed)
    whole = module.weight + sum(scale * left @ right for left, right, scale in factors)
    torch.testing.assert_close(found, expert_linear(rows, ids, whole, None, transposed), rtol=1e-12, atol=1e-12)


def test_a_model_without_adapters_has_none() -> None:
    with adapters_without_classes(nn.Linear(2, 2), "ours") as running:
        assert not running.active
