"""Copies of tensors in host memory, as quick as can be: training waits for them."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGNED = 64  # bytes


@dataclass
class Staging:
    """Host memory that is kept from one copy to the next, as fresh pages take longer than what is copied to them."""

    room: Tensor | None = None

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of ``tensors`` in host memory; those of the last call are overwritten."""
        away = iter(copy_to_host([x for x in tensors if x.device.type != "cpu"]))
        here = [x.detach() for x in tensors if x.device.type == "cpu"]
        places = iter(self._places(here))
        return [next(away) if x.device.type != "cpu" else next(places).copy_(x.detach()) for x in tensors]

    def _places(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        sizes = [-(-x.nbytes // _ALIGNED) * _ALIGNED for x in tensors]
        if self.room is None or len(self.room) < sum(sizes):
            self.room = None  # before there is another
            self.room = _room(sum(sizes))
        parts = torch.split(self.room[: sum(sizes)], sizes)
        return [part[: x.nbytes].view(x.dtype).view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def copy_to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return ``tensors`` in host memory: those that are there already, and copies of others.

    Copies from an accelerator go through pinned memory on a stream of their own: they run at the speed of the bus, and
    the host waits once for all of them. (The caching allocator of pinned memory keeps it for the next time.)
    """
    copies = [x.detach() for x in tensors]
    away = [i for i, x in enumerate(copies) if x.device.type != "cpu"]
    if not away:
        return copies
    device = copies[away[0]].device
    stream = torch.Stream(device=device)
    stream.wait_stream(torch.accelerator.current_stream(device))  # for what steps have made
    with stream:
        for i in away:
            room = torch.empty(copies[i].shape, dtype=copies[i].dtype, device="cpu", pin_memory=True)
            copies[i] = room.copy_(copies[i], non_blocking=True)
    stream.synchronize()
    return copies


def _room(size: int) -> Tensor:
    """Fresh memory, in large pages where the system has them: fewer of them are faulted in."""
    if not size:
        return torch.empty(0, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
