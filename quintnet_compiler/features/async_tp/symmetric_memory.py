"""torch's fused kernels of products with slices of other ranks (``torch.distributed._symmetric_memory``).

Devices of one machine read the slices from each other's memory, by copy engines or multicast, while they multiply.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...compat.distributed import symmetric_matmuls, use_symmetric_memory
from .ring_matmuls import Factor


@dataclass(frozen=True)
class SymmetricKernels:
    """The kernels for the ranks of a process group, by its name.

    The methods return None for products that the kernels do not support: several terms of a scatter, a bias that is
    scattered, or slices in several parts.
    """

    group: str
    gather: Callable[..., Any]
    scatter: Callable[..., Tensor]

    def all_gather_matmul(
        self, x: Tensor, dim: int, parts: int, factors: Sequence[Factor], keep: bool
    ) -> tuple[Tensor, ...] | None:
        """Compute :func:`.ring_matmuls.all_gather_matmul`."""
        if parts > 1:
            return None
        matrices = [factor.matrix for factor in factors]
        whole, products = self.gather(x.contiguous(), matrices, dim, self.group, return_A=keep)
        pairs = zip(products, factors, strict=True)
        outputs = [out if factor.bias is None else out + factor.bias for out, factor in pairs]
        return tuple(x.contiguous() for x in (*outputs, *([whole] if keep else [])))

    def matmul_reduce_scatter(
        self, xs: Sequence[Tensor], dim: int, parts: int, factors: Sequence[Factor]
    ) -> Tensor | None:
        """Compute :func:`.ring_matmuls.matmul_reduce_scatter`."""
        if parts > 1 or len(xs) > 1 or factors[0].bias is not None:
            return None
        return self.scatter(xs[0].contiguous(), factors[0].matrix, "sum", dim, self.group).contiguous()


def kernels_of(group: dist.ProcessGroup, device: torch.device) -> SymmetricKernels | None:
    """Return the kernels for ``group``, or None; every rank of the group must call this.

    There are kernels if each rank has another device of this machine, and all can read each other's memory.
    """
    if device.type != "cuda":
        return None
    devices: list[Any] = [None] * group.size()
    dist.all_gather_object(devices, (socket.gethostname(), device.index), group=group)
    hosts, indices = {host for host, _ in devices}, [index for _, index in devices]
    others = [index for index in indices if index != device.index]
    connected = len(hosts) == 1 and len(set(indices)) == len(indices)
    connected = connected and all(torch.cuda.can_device_access_peer(device.index, other) for other in others)
    agreed: list[Any] = [None] * group.size()
    dist.all_gather_object(agreed, connected, group=group)
    if not all(agreed):
        return None
    use_symmetric_memory(group)
    return fused_kernels(group)


def fused_kernels(group: dist.ProcessGroup) -> SymmetricKernels:
    """Return torch's kernels, which exist for CUDA devices and the meta device."""
    return SymmetricKernels(group.group_name, *symmetric_matmuls())
