"""The accelerator that a process has for its own, and the process group that goes with it."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from ...core.errors import RunError

SHARED = "NCCL_MULTI_RANK_GPU_ENABLE"  # NCCL's own variable, from 2.30 on: ranks may share a GPU


def take_accelerator(place: int, processes: int | None = None) -> dict[str, Any]:
    """Make accelerator number ``place`` of this machine the current device of this process.

    Where ranks may share one (NCCL's setting), numbers beyond the last begin at 0 again. ``processes``: how many this
    machine has, where that is known: with fewer accelerators, none is used.

    Returns:
        Arguments of ``dist.init_process_group``: ``backend`` (gloo without an accelerator), and ``device_id``, with
        which NCCL connects all ranks at once instead of at first use.

    Raises:
        RunError: QN301 if there is no accelerator of that number.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    backend = "gloo" if accelerator is None else dist.get_default_backend_for_device(accelerator)
    count = 0 if accelerator is None else torch.accelerator.device_count()
    shared = backend == "nccl" and os.environ.get(SHARED, "0") != "0"
    too_many = processes is not None and processes > count and not shared
    if accelerator is None or backend == "gloo" or too_many:
        return {"backend": "gloo"}
    if shared:
        place %= count
    if place >= count:
        raise RunError(
            "QN301",
            f"this process is number {place} of its machine (from 0), which has {count} {accelerator.type} devices",
            fix=f"start at most {count} processes on each machine",
        )
    torch.accelerator.set_device_index(place)
    return {"backend": backend, "device_id": torch.device(accelerator.type, place)}


def group_accelerator() -> torch.device | None:
    """Return this process's accelerator, if its process group communicates between accelerators; None otherwise."""
    if not (dist.is_available() and dist.is_initialized() and torch.accelerator.is_available()):
        return None
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    backends = dict(part.split(":") for part in dist.get_backend_config().split(","))
    if backends.get(accelerator.type, "gloo") == "gloo":
        return None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
