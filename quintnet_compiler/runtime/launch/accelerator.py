"""The accelerator that a process has for its own, and the process group that goes with it."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from ...core.errors import RunError

SHARED = "NCCL_MULTI_RANK_GPU_ENABLE"  # NCCL's own variable, from 2.30 on: ranks may share a GPU


def take_accelerator(place: int, processes: int | None = None) -> dict[str, Any]:
    """Make accelerator number ``place`` of this machine the current device of this process. Where NCCL is told that
    ranks may share one, numbers that there are not begin at 0 again.

    ``processes``: how many this machine has, where that is known: with fewer accelerators, none is used.

    Returns:
        What to give ``dist.init_process_group``: ``backend`` (gloo without an accelerator), and ``device_id``, with
        which NCCL connects all ranks at once instead of at first use.

    Raises:
        RunError: QN301 if there is no accelerator of that number.
    """
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    backend = "gloo" if found is None else dist.get_default_backend_for_device(found)
    count = 0 if found is None else torch.accelerator.device_count()
    shared = backend == "nccl" and os.environ.get(SHARED, "0") != "0"
    too_many = processes is not None and processes > count and not shared
    if found is None or backend == "gloo" or too_many:
        return {"backend": "gloo"}
    if shared:
        place %= count
    if place >= count:
        raise RunError(
            "QN301",
            f"this process is number {place} of its machine (from 0), which has {count} {found.type} devices",
            fix=f"start at most {count} processes on each machine",
        )
    torch.accelerator.set_device_index(place)
    return {"backend": backend, "device_id": torch.device(found.type, place)}


def group_accelerator() -> torch.device | None:
    """This process's accelerator, if its process group communicates between accelerators; None otherwise."""
    if not (dist.is_available() and dist.is_initialized() and torch.accelerator.is_available()):
        return None
    found = torch.accelerator.current_accelerator()
    assert found is not None
    backends = dict(part.split(":") for part in dist.get_backend_config().split(","))
    if backends.get(found.type, "gloo") == "gloo":
        return None
    return torch.device(found.type, torch.accelerator.current_device_index())
