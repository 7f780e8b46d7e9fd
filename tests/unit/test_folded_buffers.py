"""weights.folded_buffers: expanded buffers get memory of their own, and ties stay."""

from __future__ import annotations

import torch
from torch import nn

from quintnet_compiler.weights.folded_buffers import is_folded, unfold_buffers


def test_only_expanded_tensors_are_folded() -> None:
    folded = torch.ones(1).expand(5), torch.ones(3).expand(4, 3)
    others = torch.ones(5), torch.ones(5).expand(1, 5), torch.ones(4, 3).t(), torch.tensor(1.0), torch.ones(1).expand(1)
    assert all(map(is_folded, folded)) and not any(map(is_folded, others))


def test_buffers_get_memory_of_their_own() -> None:
    model, x, kept = nn.Module(), torch.arange(3.0).expand(2, 3), torch.ones(2)
    for name, buffer in {"a": x, "b": x, "c": kept, "d": None}.items():
        model.register_buffer(name, buffer)
    unfold_buffers(model)
    assert model.a is model.b and model.a.is_contiguous() and torch.equal(model.a, x)
    assert model.c is kept and model.d is None
