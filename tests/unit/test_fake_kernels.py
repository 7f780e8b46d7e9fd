"""The check of fake kernels: results whose layout in memory is not what register_fake says."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import Mesh
from quintnet_compiler.checks.fake_kernels import check_fake_kernels

from .graphs import builder, leaf


def _defined(name: str, kernel: Callable[[Tensor], Tensor], fake: Callable[[Tensor], Tensor]) -> Any:
    def operator(x: Tensor) -> Tensor:
        return kernel(x)

    custom = torch.library.custom_op(f"quintnet_fakes::{name}", operator, mutates_args=())
    custom.register_fake(fake)
    custom.register_autograd(lambda ctx, gradient: torch.ones_like(gradient))
    return custom


def _transposed(x: Tensor) -> Tensor:
    return x.T.contiguous().T


def _shifted_in_place(x: Tensor) -> Tensor:
    x.add_(1)
    return x.clone()


OPERATORS = {
    "strides": (_defined("strides", _transposed, torch.empty_like), r"strides \[1, 2\].* with strides \[8, 1\]"),
    "dtype": (_defined("dtype", lambda x: x.float(), torch.empty_like), r"float32\[2, 8\].* kernel float64\[2, 8\]"),
    "size": (
        _defined("size", lambda x: x[:, :7].clone(), torch.empty_like),
        r"float64\[2, 7\].* kernel float64\[2, 8\]",
    ),
    "writes": (_defined("writes", _shifted_in_place, torch.empty_like), r"writes to its tensor argument 0"),
}
right = _defined("right", _transposed, lambda x: x.new_empty([x.shape[1], x.shape[0]]).T)


class Net(nn.Module):
    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.first, self.operator = nn.Linear(6, 8), operator

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.operator(self.first(x)).double()
        return out


BATCH = torch.randn(2, 6, dtype=torch.float64), torch.tensor([0, 3])


@pytest.mark.parametrize("name", OPERATORS)
def test_a_fake_kernel_that_is_wrong_is_found_at_compile(name: str) -> None:
    operator, text = OPERATORS[name]
    with pytest.raises(quintnet.QuintNetError, match=f"QN114 .*(?s:.)*quintnet_fakes.{name}.default: .*{text}"):
        quintnet.compile(Net(operator).double(), Mesh(dp=1), BATCH, loss_fn=F.cross_entropy)


def test_a_fake_kernel_that_is_right_passes() -> None:
    quintnet.compile(Net(right).double(), Mesh(dp=1), BATCH, loss_fn=F.cross_entropy)


def test_the_check_reads_a_graph_alone() -> None:
    to = builder()
    to.call(torch.ops.quintnet_fakes.size.default, leaf(to, "input", "x", 2, 8))
    program: Any = SimpleNamespace(graph=to.graph)
    with pytest.raises(quintnet.QuintNetError, match=r"QN114 (?s:.)*\[2, 7\]"):
        check_fake_kernels(program)


@torch.library.custom_op("quintnet_fakes::filled", mutates_args=())
def filled(size: int) -> Tensor:
    return torch.ones(size, 2).T


@filled.register_fake
def _(size: int) -> Tensor:
    return torch.empty(2, size)


def test_an_operator_without_tensors_is_not_run() -> None:
    to = builder()
    to.call(torch.ops.quintnet_fakes.filled.default, 3)
    program: Any = SimpleNamespace(graph=to.graph)
    check_fake_kernels(program)
