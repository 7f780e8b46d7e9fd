"""runtime.state.buckets: which gradients share a message, and where they lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintnet
from quintnet_compiler.runtime.state.buckets import ALIGNMENT, aligned_count
from quintnet_compiler.runtime.state.gradients import GradientStore
from quintnet_compiler.runtime.transport.local import LocalWorld

pytestmark = pytest.mark.usefixtures("shared_captures")


class Odd(nn.Module):
    """Parameters of one, three and five elements among others."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(3))
        self.layers = nn.ModuleList(nn.Linear(n, m) for n, m in ((6, 10), (10, 5), (5, 3)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * self.scale + self.shift


def _compiled(dtype: torch.dtype = torch.float32, **options: Any) -> quintnet.CompiledProgram:
    torch.manual_seed(0)
    batch = (torch.randn(8, 6, dtype=dtype), torch.randn(8, 3, dtype=dtype))
    how = {"loss_fn": nn.functional.mse_loss, "check": "off", **options}
    return quintnet.compile(Odd().to(dtype), quintnet.Mesh(dp=2), batch, **how)


def _store(program: quintnet.CompiledProgram) -> GradientStore:
    made, world = program._primary().program, LocalWorld(quintnet.Mesh(dp=2))
    return GradientStore(made, made.rank(1), world.transport(1), torch.device("cpu"))


def test_room_is_a_multiple_of_16_bytes() -> None:
    assert [aligned_count(n, torch.float32) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]
    assert [aligned_count(n, torch.bfloat16) for n in (1, 9)] == [8, 16] and aligned_count(3, torch.complex128) == 3


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_gradient_is_aligned(zero: int, dtype: torch.dtype) -> None:
    store = _store(_compiled(dtype, zero=zero))
    for bucket in store.buckets:
        bucket.buffer.fill_(float("nan"))
        for view in (bucket.own, *bucket.views.values(), *bucket.slots.values()):
            assert view.storage_offset() * view.itemsize % ALIGNMENT == 0
        for view in bucket.slots.values():
            view.zero_()
        bucket.free_buffer()
        bucket.allocate()
        for view in bucket.slots.values():
            view.zero_()
        assert not bucket.buffer.any()  # nothing of the gaps is added up or looked for


@pytest.mark.sample(1)
@pytest.mark.parametrize("zero", [0, 1])
def test_gradients_of_odd_sizes_are_those_of_the_unsplit_model(zero: int) -> None:
    assert _compiled(torch.float64, zero=zero, microbatches=2).verify().ok


@pytest.mark.slow
def test_buckets_are_as_large_as_the_plan_says() -> None:
    few, many = _compiled(), _compiled(bucket_mib=1e-6)
    assert (len(_store(few).buckets), len(_store(many).buckets)) == (1, 8)
    assert few._primary().program.digest != many._primary().program.digest  # ranks must agree
    assert many.verify(steps=1, limit=1e-4).ok
