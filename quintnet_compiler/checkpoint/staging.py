"""Copies of an accelerator's tensors in host memory, all of them on their way at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def on_host(tensors: Sequence[Tensor], *, copy: bool) -> list[Tensor]:
    """``tensors`` in host memory; with ``copy``, later steps do not change them. What lies on an accelerator comes
    through pinned memory on a stream of its own, so that copies run at the speed of the bus, and the host waits once
    for all of them. (The caching allocator of pinned memory keeps it for the next time.)"""
    found = [x.detach().clone() if copy and x.device.type == "cpu" else x.detach() for x in tensors]
    away = [i for i, x in enumerate(found) if x.device.type != "cpu"]
    if not away:
        return found
    device = found[away[0]].device
    stream = torch.Stream(device=device)
    stream.wait_stream(torch.accelerator.current_stream(device))  # for what steps have made
    with stream:
        for i in away:
            room = torch.empty(found[i].shape, dtype=found[i].dtype, device="cpu", pin_memory=True)
            found[i] = room.copy_(found[i], non_blocking=True)
    stream.synchronize()
    return found
