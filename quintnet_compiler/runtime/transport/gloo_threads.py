"""The scheduling policy of gloo's reader threads."""

from __future__ import annotations

import os
import sys
from pathlib import Path

NAME = "gloo_tcp_loop"  # of the thread that reads the connections of a process group; torch 2.11 gave it none


def lower_gloo_thread_priority() -> None:
    """Let gloo's reader threads wait until a core is free, as batch threads on Linux (``sched(7)``) do.

    A rank's message wakes the reader at the other end. With the usual policy it would take over the writer's core, and
    poll while the preempted writer still holds the lock of its connection. Batch threads get the same share of time.
    Threads with another policy than the usual one, and other systems than Linux, are left alone.
    """
    threads = Path("/proc/self/task")
    if sys.platform != "linux" or not threads.is_dir():
        return
    for thread in threads.iterdir():
        try:
            is_reader, number = (thread / "comm").read_text().strip() == NAME, int(thread.name)
            if is_reader and os.sched_getscheduler(number) == os.SCHED_OTHER:
                os.sched_setscheduler(number, os.SCHED_BATCH, os.sched_param(0))
        except OSError:  # it has ended, or may not be changed
            continue
