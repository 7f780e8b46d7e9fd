"""The smallest thing that ranks can do together."""

from __future__ import annotations

import torch
import torch.distributed as dist


def smoke() -> float:
    """On each rank: the sum of 1, 2, ... over all ranks."""
    device = torch.accelerator.current_accelerator() if dist.get_backend() != "gloo" else None
    x = torch.tensor(dist.get_rank() + 1.0, device=device)
    dist.all_reduce(x)
    return x.item()


def backends() -> tuple[str, ...]:
    """Return the communication backends with which torch was built."""
    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    return tuple(name for name, available in backends.items() if available)
