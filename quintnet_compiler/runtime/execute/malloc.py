"""Settings of glibc's memory allocator."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
TRIM_BYTES, MMAP_BYTES = 2**30, 2**25  # glibc's maximum for the second is 2**25


def tune_malloc() -> None:
    """Keep up to 1 GiB that a step frees for the next step.

    By default glibc returns the top of its heap to the system again and again, and page faults when it grows again take
    5% of a small model's step. Other allocators are left alone.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    for parameter, num_bytes in ((M_TRIM_THRESHOLD, TRIM_BYTES), (M_MMAP_THRESHOLD, MMAP_BYTES)):
        mallopt(parameter, num_bytes)
