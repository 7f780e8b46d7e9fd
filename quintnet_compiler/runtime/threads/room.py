"""Room for threads under a limit of the process's address space (``ulimit -v``).

A thread that gets a stack and then no memory ends before it says that it runs: ``Thread.start`` waits for ever.
"""

from __future__ import annotations

import resource
import threading
from pathlib import Path

BYTES_OF_THREAD = 96 * 2**20  # reserved for one: a stack of 8 MiB, an arena of malloc of 64 MiB, and what it runs with


def has_room(threads: int) -> bool:
    """Return whether this process may start so many threads more, as far as its limit is known."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    pages = Path("/proc/self/statm")
    if limit == resource.RLIM_INFINITY or not pages.exists():
        return True
    used = int(pages.read_text().split()[0]) * resource.getpagesize()
    return limit - used >= threads * BYTES_OF_THREAD


def start_thread(thread: threading.Thread) -> None:
    """Start a thread, or raise RuntimeError: as the system refuses one, or because there is no room for it."""
    if not has_room(1):
        raise RuntimeError("can't start new thread: the limit of address space (ulimit -v) leaves no room for it")
    thread.start()
