"""A process group for several processes on one device: values travel through gloo, on copies in host memory.

NCCL refuses two ranks on one device. With this group the runtime does everything else as on many: a process for each
rank, tensors on the device, the same calls of torch.distributed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "staged"
HALF = (torch.float16, torch.bfloat16)  # added up in float32


class Later(dist._Work):
    """Work that is done when it is waited for, at most once."""

    def __init__(self, end: Callable[[], object] | None = None) -> None:
        super().__init__()
        self.end = end

    def wait(self, timeout: timedelta | None = None) -> bool:
        end, self.end = self.end, None
        if end is not None:
            end()
        return True

    def is_completed(self) -> bool:
        return self.end is None


def _host(x: Tensor) -> Tensor:
    return x.detach().cpu().contiguous()


class StagedGroup(dist.ProcessGroup):
    """A process group whose collectives end before they return; transfers of two ranks end when they are waited for."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.names = {"name": "", "desc": ""}

    def getBackendName(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self.names["name"] = name

    def _set_group_desc(self, desc: str) -> None:
        self.names["desc"] = desc

    @property
    def group_name(self) -> str:
        return self.names["name"]

    @property
    def group_desc(self) -> str:
        return self.names["desc"]

    def allreduce(self, xs: list[Tensor], options: Any = None) -> Later:
        reduced = [_host(x).float() if x.dtype in HALF else _host(x) for x in xs]
        self.gloo.allreduce(reduced, options or dist.AllreduceOptions()).wait()
        return _put(xs, reduced)

    def broadcast(self, xs: list[Tensor], options: Any) -> Later:
        received = [_host(x) for x in xs]
        self.gloo.broadcast(received, options).wait()
        return _put(xs, received)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> Later:
        return _put(outputs[0], self._gathered(inputs[0]))

    def _gathered(self, x: Tensor) -> list[Tensor]:
        data = _host(x)
        parts = [torch.empty_like(data) for _ in range(self.size())]
        self.gloo.allgather([parts], [data]).wait()
        return parts

    def all_gather_single(self, output: Tensor, input_: Tensor, *_: Any, **__: Any) -> Later:
        return _put([output], [torch.cat([x.reshape(-1) for x in self._gathered(input_)])])

    def reduce_scatter_single(self, output: Tensor, input_: Tensor, *_: Any, **__: Any) -> Later:
        total = _host(input_).reshape(-1)
        total = total.float() if total.dtype in HALF else total.clone()
        self.gloo.allreduce([total]).wait()
        return _put([output], [total.view(self.size(), -1)[self.rank()]])

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], *_: Any) -> Later:
        for output, x in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, x)
        return Later()

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], *_: Any) -> Later:
        for output, x in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, x)
        return Later()

    def all_to_all_single(
        self,
        output: Tensor,
        input_: Tensor,
        receives: Sequence[int] | None = None,
        sends: Sequence[int] | None = None,
        *_: Any,
        **__: Any,
    ) -> Later:
        received = torch.empty(output.shape, dtype=output.dtype)
        self.gloo.alltoall_base(received, _host(input_), list(receives or []), list(sends or [])).wait()
        return _put([output], [received])

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single

    def barrier(self, options: Any = None) -> Later:
        self.gloo.barrier().wait()
        return Later()

    def send(self, xs: list[Tensor], to: int, tag: int = 0) -> Later:
        sent = _host(xs[0])
        work = self.gloo.send([sent], to, tag)
        return Later(lambda: (work.wait(), sent))

    def recv(self, xs: list[Tensor], source: int, tag: int = 0) -> Later:
        got = torch.empty(xs[0].shape, dtype=xs[0].dtype)
        work = self.gloo.recv([got], source, tag)
        return Later(lambda: (work.wait(), xs[0].copy_(got)))


def _put(outputs: Sequence[Tensor], results: Sequence[Tensor]) -> Later:
    for x, y in zip(outputs, results, strict=True):
        x.copy_(y.view(x.shape))
    return Later()


def register(kind: str) -> None:
    """Make the group a backend of torch.distributed, for devices of this ``kind``."""

    def group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> StagedGroup:
        return StagedGroup(store, rank, size, timeout)

    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, group, devices=[kind])
