"""Slices of a DTensor along its split dim: what is written into them is in the whole tensor, as with a plain tensor."""

from __future__ import annotations

import contextlib
import threading

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import quintnet
from quintnet_compiler.compat.distributed import dtensor_operators, handled_by_torch
from quintnet_compiler.dtensors.whole_dtensors import use_whole_dtensors


def _rows(x: Tensor) -> None:
    x[3].zero_()
    x[1:3].mul_(2).add_(1)
    x[-1] += 5
    x[0] = x[4] * 2
    x[2] = 3.0
    x[:, 1] = torch.tensor(7.0)


def _chunks(x: Tensor) -> None:
    query, key, value = x.chunk(3)
    query.mul_(2)
    key[0].add_(1)
    value.T.copy_(torch.ones_like(value.T) * query.sum())
    for number, row in enumerate(x.split(1)):
        row.add_(number)


def _overlapping(x: Tensor) -> None:
    first, last = x[:4], x[2:]
    first.mul_(2)
    last.add_(1)
    x.mul_(3)
    first.sub_(1)


def _parts_of_views(x: Tensor) -> None:
    x.T[1].add_(3)
    x.T[:, 3].detach().add_(1)
    x.view(-1)[3:9].mul_(2)
    x.diagonal().fill_(4.0)
    x[3][1:].data.zero_()


def _lists_and_results(x: Tensor) -> None:
    torch._foreach_add_([x[0], x[3]], 1.0)
    torch.add(x[0].clone(), x[1].clone(), out=x[2])


def _drawn(x: Tensor) -> None:
    torch.manual_seed(0)
    nn.init.normal_(x[1:3])
    x[5].uniform_()


def _copies(x: Tensor) -> None:
    x[1].clone().zero_()
    (x[2] + 1).mul_(2)


WRITES = (_rows, _chunks, _overlapping, _parts_of_views, _lists_and_results, _drawn, _copies)


def _written() -> dict[str, tuple[Tensor, Tensor]]:
    """Return what a plain tensor and a split one have after each function of ``WRITES``."""
    use_whole_dtensors()
    mesh, written = init_device_mesh("cpu", (2,)), {}
    for write in WRITES:
        for dim in (0, 1):
            expected = torch.arange(24.0).view(6, 4)
            split = distribute_tensor(expected.clone(), mesh, [Shard(dim)])
            x = split if dim else nn.Parameter(split)
            with torch.no_grad():
                write(expected)
                write(x)
            written[f"{write.__name__} dim {dim}"] = x.full_tensor().detach(), expected
    return written


def _written_meanwhile() -> Tensor:
    """Return what another thread writes into slices of a tensor while torch computes the same operators in this one."""
    use_whole_dtensors()
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.zeros(6, 4), mesh, [Shard(0)])
    x[0].add_(1)
    operators = torch.ops.aten.add_.Tensor, torch.ops.aten.slice.Tensor, torch.ops.aten.select.int

    def write() -> None:
        x[1:3].add_(2)
        x[3].add_(3)

    with contextlib.ExitStack() as stack:
        for operator in operators:
            stack.enter_context(handled_by_torch(operator))
        assert not dtensor_operators().keys() & set(operators)
        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
    assert set(operators) <= dtensor_operators().keys()
    return x.full_tensor()


def test_another_threads_writes_reach_the_whole_tensor() -> None:
    for written in quintnet.launch(_written_meanwhile, 2, timeout=60):
        assert written[:, 0].tolist() == [1, 2, 2, 3, 0, 0]


def test_writes_reach_the_whole_tensor() -> None:
    for written in quintnet.launch(_written, 2, timeout=60):
        assert len(written) == 2 * len(WRITES)
        assert [name for name, (x, expected) in written.items() if not torch.equal(x, expected)] == []
