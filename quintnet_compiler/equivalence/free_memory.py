"""Free memory of a device."""

from __future__ import annotations

from pathlib import Path

import torch

_GROUPS = (  # limit, in use
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated on ``device``; None if the system does not tell."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type != "cpu":
        return None
    limits = [
        limit - used for a, b in _GROUPS if (limit := _number(a)) is not None and (used := _number(b)) is not None
    ]
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        limits.append(int(lines["MemAvailable"].split()[0]) * 1024)
    except (OSError, KeyError, ValueError):
        pass
    return min(limits, default=None)


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None
