"""Kernels that are launched on addresses: the error names the Function, and the lines that it offers work."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import Mesh
from quintnet_compiler.capture.raw_kernels import raw_kernel

BATCH = torch.randn(4, 6, dtype=torch.float64), torch.tensor([0, 3, 1, 2])


def _numbers(x: Tensor) -> Any:
    return (ctypes.c_double * x.numel()).from_address(x.data_ptr())


def launch(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    _numbers(out)[:] = [2 * number * number for number in _numbers(x)]
    return out


def launch_backward(gradient: Tensor, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    _numbers(out)[:] = [4 * g * number for g, number in zip(_numbers(gradient.contiguous()), _numbers(x), strict=True)]
    return out


class TwiceSquared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return launch(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return launch_backward(gradient, *ctx.saved_tensors)


class Net(nn.Module):
    def __init__(self, kernel: Any) -> None:
        super().__init__()
        self.first, self.last, self.kernel = nn.Linear(6, 8), nn.Linear(8, 5), kernel

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.kernel(self.first(x)))
        return out


def test_the_lines_that_an_error_offers_work() -> None:
    plain = Net(TwiceSquared.apply).double()
    with pytest.raises(quintnet.QuintNetError, match=r"QN101 (?s:.)*Function TwiceSquared launches reads") as refusal:
        quintnet.compile(plain, Mesh(dp=1), BATCH, loss_fn=F.cross_entropy)
    lines = refusal.value.fix.partition(":\n")[2]
    space = {"torch": torch, "quintnet": quintnet, "launch": launch, "launch_backward": launch_backward}
    exec(lines, space)
    model = Net(space["twice_squared"]).double()
    model.load_state_dict(plain.state_dict())
    loss = F.cross_entropy(plain(BATCH[0]), BATCH[1])
    loss.backward()
    program = quintnet.compile(model, Mesh(dp=2), BATCH, loss_fn=F.cross_entropy, rules=space["rules"])
    torch.testing.assert_close(program.step(BATCH), loss.detach(), rtol=1e-12, atol=1e-12)
    for name, parameter in program.named_parameters():
        gradient = plain.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad.full_tensor(), gradient, rtol=1e-12, atol=1e-12)  # type: ignore[union-attr]


def test_other_errors_are_not_about_kernels() -> None:
    assert raw_kernel(ValueError("shape")) is None
