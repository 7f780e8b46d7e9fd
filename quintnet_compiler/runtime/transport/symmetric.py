"""torch's fused kernels for products with slices that other ranks hold: devices of one machine read them from each
other's memory, by copy engines or multicast, while they multiply (``torch.distributed._symmetric_memory``)."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...compat.distributed import symmetric_matmuls, use_symmetric_memory
from .async_matmul import Factor


@dataclass(frozen=True)
class Kernels:
    """The kernels for the ranks of a process group, by its name. None where they have no such product: several terms of
    a scatter, a bias that is scattered, or slices in several parts."""

    group: str
    gather: Callable[..., Any]
    scatter: Callable[..., Tensor]

    def all_gather_matmul(
        self, x: Tensor, dim: int, parts: int, factors: Sequence[Factor], keep: bool
    ) -> tuple[Tensor, ...] | None:
        """As :func:`.async_matmul.all_gather_matmul`."""
        if parts > 1:
            return None
        matrices = [factor.matrix for factor in factors]
        whole, made = self.gather(x.contiguous(), matrices, dim, self.group, return_A=keep)
        pairs = zip(made, factors, strict=True)
        found = [out if factor.bias is None else out + factor.bias for out, factor in pairs]
        return tuple(x.contiguous() for x in (*found, *([whole] if keep else [])))

    def matmul_reduce_scatter(
        self, xs: Sequence[Tensor], dim: int, parts: int, factors: Sequence[Factor]
    ) -> Tensor | None:
        """As :func:`.async_matmul.matmul_reduce_scatter`."""
        if parts > 1 or len(xs) > 1 or factors[0].bias is not None:
            return None
        return self.scatter(xs[0].contiguous(), factors[0].matrix, "sum", dim, self.group).contiguous()


def kernels_of(group: dist.ProcessGroup, device: torch.device) -> Kernels | None:
    """The kernels for ``group``, if each of its ranks has a device of this machine, and all can read each other's
    memory. Every rank of the group must ask."""
    if device.type != "cuda":
        return None
    places: list[Any] = [None] * group.size()
    dist.all_gather_object(places, (socket.gethostname(), device.index), group=group)
    hosts, indices = {host for host, _ in places}, [index for _, index in places]
    others = [index for index in indices if index != device.index]
    near = len(hosts) == 1 and len(set(indices)) == len(indices)
    near = near and all(torch.cuda.can_device_access_peer(device.index, other) for other in others)
    agreed: list[Any] = [None] * group.size()
    dist.all_gather_object(agreed, near, group=group)
    if not all(agreed):
        return None
    use_symmetric_memory(group)
    return fused_kernels(group)


def fused_kernels(group: dist.ProcessGroup) -> Kernels:
    """torch's own, which it has on CUDA devices (and for shapes alone)."""
    return Kernels(group.group_name, *symmetric_matmuls())
