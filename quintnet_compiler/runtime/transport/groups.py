"""Process groups beside the world's, whose ranks wait for each other as long as the world's do.

A group that is made without a timeout gets torch's default (10 minutes with NCCL, 30 with gloo).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ...compat.distributed import timeout_of, wait_as_long


def patience_of_world() -> float:
    """Return the seconds that ranks of the world wait for each other."""
    assert dist.group.WORLD is not None
    return timeout_of(dist.group.WORLD)


def new_group(ranks: Sequence[int] | None = None, backend: str | None = None) -> dist.ProcessGroup:
    """Make a group of ``ranks`` (all of the world by default). Every rank must call this, in the same order."""
    timeout = timedelta(seconds=patience_of_world())
    group: dist.ProcessGroup = dist.new_group(None if ranks is None else list(ranks), timeout=timeout, backend=backend)
    return group


def mesh_of_groups(device_type: str, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """Make a DeviceMesh over ``ranks``, and its groups. Every rank must call this, in the same order."""
    mesh = DeviceMesh(device_type, ranks, mesh_dim_names=names)
    for name in names if mesh.get_coordinate() is not None else ():
        wait_as_long(mesh.get_group(name), patience_of_world())
    return mesh
