"""A parameter of which a process has a part: assigned to, copied, pickled."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from quintnet_compiler.compat.distributed import dtensor_over, local_tensor
from quintnet_compiler.core.errors import RunError
from quintnet_compiler.runtime.state.split_parameter import SplitParameter, split_parameter


@pytest.fixture
def devices() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[call-arg]
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def _parameter(devices: DeviceMesh) -> SplitParameter:
    part = torch.arange(24.0).view(4, 6)[2:]  # within a larger memory
    return split_parameter(dtensor_over(part, devices, [Shard(0)], torch.Size((2, 6)), (6, 1)), trainable=True)


def test_it_is_copied_and_pickled_where_it_lies_within_a_larger_memory(devices: DeviceMesh) -> None:
    parameter = _parameter(devices)
    assert isinstance(parameter, nn.Parameter)
    assert isinstance(parameter, DTensor)
    parameter.grad = parameter.detach().clone()
    one, two = copy.deepcopy([parameter, parameter])
    assert one is two
    assert (one.grad, one.requires_grad) == (None, True)
    again = pickle.loads(pickle.dumps(parameter))
    assert isinstance(again, nn.Parameter)
    for x in (one, again, pickle.loads(pickle.dumps(parameter.detach())), copy.deepcopy(parameter.data)):
        assert torch.equal(x.full_tensor(), torch.arange(12.0, 24).view(2, 6))
        assert local_tensor(x).data_ptr() != local_tensor(parameter).data_ptr()


def test_data_is_assigned_and_what_does_not_fit_is_refused(devices: DeviceMesh) -> None:
    parameter = _parameter(devices)
    old, new = parameter.data, torch.zeros_like(parameter)
    parameter.data = new
    assert parameter.full_tensor().sum() == 0
    parameter.data = old
    assert float(parameter.full_tensor()[0, 0]) == 12
    whole = dtensor_over(torch.zeros(2, 6), devices, [Replicate()], torch.Size((2, 6)), (6, 1))
    for x, text in ((torch.zeros(2, 6), "no DTensor"), (whole, r"\(R\)"), (new.double(), "float64")):
        with pytest.raises(RunError, match=text):
            parameter.data = x
    with torch.no_grad():
        parameter.data.add_(1.0)  # in its memory
    assert float(parameter.full_tensor()[0, 0]) == 13
