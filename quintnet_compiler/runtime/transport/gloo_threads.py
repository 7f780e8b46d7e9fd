"""How the system schedules the threads with which gloo reads."""

from __future__ import annotations

import os
import sys
from pathlib import Path

NAME = "gloo_tcp_loop"  # of the thread that reads the connections of a process group; torch 2.11 gave it none


def lower_gloo_thread_priority() -> None:
    """Let gloo's readers wait until a core is free, as Linux's batch threads do (``sched(7)``): their share stays.

    What a rank writes wakes the reader at the other end, which would take the writer's core from it at once, and poll
    there as long as the writer, which has not gone on, holds the lock of its connection. A thread that has another
    policy than the usual one keeps it; so do all where the system is not Linux."""
    threads = Path("/proc/self/task")
    if sys.platform != "linux" or not threads.is_dir():
        return
    for thread in threads.iterdir():
        try:
            named, number = (thread / "comm").read_text().strip() == NAME, int(thread.name)
            if named and os.sched_getscheduler(number) == os.SCHED_OTHER:
                os.sched_setscheduler(number, os.SCHED_BATCH, os.sched_param(0))
        except OSError:  # it has ended, or may not be changed
            continue
