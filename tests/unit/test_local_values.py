"""Random numbers for DTensors are this rank's part of those for the whole tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from quintnet_compiler.compat.distributed import interleaved_shard
from quintnet_compiler.core.errors import RunError
from quintnet_compiler.runtime.state.local_values import StageGradient, read_and_draw_whole_dtensors

DRAWS: list[Callable[[Tensor], Tensor]] = [
    torch.randn_like,
    torch.rand_like,
    lambda x: torch.randint_like(x, 2, 9),
    lambda x: x.normal_(1.0, 2.0),
    lambda x: nn.init.uniform_(x, -1.0, 3.0),
    lambda x: x.bernoulli_(0.3),
    lambda x: x.exponential_(generator=torch.Generator().manual_seed(3)),
]


@pytest.fixture(params=[0, 1])
def mesh(request: pytest.FixtureRequest) -> Iterator[tuple[int, DeviceMesh]]:
    """Yield a rank of two, and their mesh."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=2)
    yield request.param, init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "kind, parts",
    [
        (Shard(0), [[0, 1, 2], [3, 4]]),
        (Replicate(), [[0, 1, 2, 3, 4]] * 2),
        (interleaved_shard(0, 2), [[0, 2], [1, 3]]),
    ],
    ids=["rows", "whole", "two parts"],
)
def test_numbers_are_those_of_the_whole_tensor(kind: Any, parts: list[list[int]], mesh: tuple[int, DeviceMesh]) -> None:
    read_and_draw_whole_dtensors()
    rank, devices = mesh
    rows = parts[rank]
    whole = torch.zeros(len({*parts[0], *parts[1]}), 3)
    for draw in DRAWS:
        x = DTensor.from_local(whole[rows], devices, [kind], run_check=False, shape=whole.shape, stride=whole.stride())
        torch.manual_seed(0)
        expected, state = draw(whole.clone()), torch.get_rng_state()
        torch.manual_seed(0)
        drawn = draw(x)
        assert isinstance(drawn, DTensor) and torch.equal(drawn.to_local(), expected[rows])
        assert torch.equal(torch.get_rng_state(), state)


def test_a_gradient_of_a_stage_is_refused(mesh: tuple[int, DeviceMesh]) -> None:
    read_and_draw_whole_dtensors()
    _, devices = mesh
    gradient = DTensor.from_local(torch.zeros(2, 3), devices, [Replicate()], run_check=False)
    gradient.__class__ = StageGradient
    with pytest.raises(RunError, match=r"QN113(.|\n)*would draw those of all parameters"):
        torch.randn_like(gradient)
