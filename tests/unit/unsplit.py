"""A step of a compiled model beside one of the model itself."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

import quintnet


def check_step(model: nn.Module, axes: Mapping[str, int], batch: tuple[Tensor, Tensor]) -> quintnet.CompiledProgram:
    """Loss and gradients in float64 are those of the unsplit model; returns the program."""
    twin = copy.deepcopy(model)
    expected = nn.functional.mse_loss(twin(batch[0]), batch[1])
    expected.backward()  # type: ignore[no-untyped-call]
    program = quintnet.compile(model, quintnet.Mesh(**axes), batch, loss_fn=nn.functional.mse_loss)
    assert torch.allclose(torch.as_tensor(program.step(batch), dtype=torch.float64), expected.detach(), atol=1e-13)
    for name, p in program.named_parameters():
        grad = twin.get_parameter(name).grad
        assert grad is not None and torch.allclose(p.grad.full_tensor(), grad, atol=1e-13)  # type: ignore[union-attr]
    return program
