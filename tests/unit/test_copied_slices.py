"""Slices of a DTensor that are copies; tests/test_copied_slices.py writes into them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from quintnet_compiler.dtensors.copied_slices import SliceSource
from quintnet_compiler.dtensors.whole_dtensors import use_whole_dtensors


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.mark.parametrize("is_inference", [False, True])
def test_slices_along_a_split_dim_are_copies(is_inference: bool, mesh: DeviceMesh) -> None:
    use_whole_dtensors()
    with torch.inference_mode(is_inference):
        x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]).clone()
        assert [hasattr(view, "source_of_slice") for view in (x[1], x[1:3], x[:, 1], x.T, x.view(2, 2, 2))] == [
            True, True, False, False, False
        ]  # fmt: skip
        row = x[1:3][0]
        assert isinstance(row.source_of_slice, SliceSource)
        assert row.source_of_slice.whole.source_of_slice.whole is x
        assert torch.equal(row.source_of_slice.take(torch.tensor([[5.0, 6.0], [7.0, 8.0]])), torch.tensor([5.0, 6.0]))
