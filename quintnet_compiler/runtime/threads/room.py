"""Room for threads under a limit of the process's address space (``ulimit -v``).

A thread that gets a stack and then no memory ends before it has said that it runs, and ``Thread.start`` waits for that
word for ever. So none is started where there may be too little.
"""

from __future__ import annotations

import contextlib
import resource
import threading
from pathlib import Path

BYTES_OF_THREAD = 96 * 2**20  # reserved for one: a stack of 8 MiB, an arena of malloc of 64 MiB, and what it runs with


def has_room(threads: int) -> bool:
    """Return whether this process may start so many threads more, as far as its limit is known."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return True
    with contextlib.suppress(OSError, ValueError):  # a system without /proc
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        return limit - pages * resource.getpagesize() >= threads * BYTES_OF_THREAD
    return True


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        RuntimeError: if the system refuses one, or the limit of address space leaves no room for it.
    """
    if not has_room(1):
        raise RuntimeError("can't start new thread: the limit of address space (ulimit -v) leaves no room for it")
    thread.start()
