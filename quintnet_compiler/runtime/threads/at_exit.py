"""Background work of a process, which is finished before the process leaves its group, or ends."""

from __future__ import annotations

import atexit
import os
import threading
import time
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

from ...core.errors import CheckpointWarning, QuintNetError

PATIENCE = 600.0  # seconds that a process waits at its end for background work


class Unfinished(Protocol):
    """Work that runs in a thread."""

    @property
    def over(self) -> bool:
        """Return whether it has ended without an error that is still to be raised."""

    def finish(self, seconds: float) -> None:
        """Wait until it has ended.

        Raises:
            QuintNetError: if it takes longer than ``seconds``, or if it failed and the error was not raised yet.
        """


def finish_at_exit(work: Unfinished) -> None:
    """Remember ``work`` until it has ended: see :func:`finish_all`. The interpreter's exit waits for it, too."""
    unfinished = _under_way(os.getpid())
    unfinished[:] = [task for task in unfinished if not task.over]
    unfinished.append(work)


def finish_all(seconds: float) -> None:
    """Wait until all background work of this process has ended.

    Raises:
        QuintNetError: the first one, see :meth:`Unfinished.finish`.
    """
    deadline, errors = time.monotonic() + seconds, list[QuintNetError]()
    unfinished = _under_way(os.getpid())
    while unfinished:
        try:
            unfinished.pop(0).finish(max(0.0, deadline - time.monotonic()))
        except QuintNetError as error:
            errors.append(error)
    if errors:
        raise errors[0]


@lru_cache(maxsize=1)
def _under_way(process: int) -> list[Unfinished]:
    """Return the list of a process's work, empty in a forked process, and have it finished at exit."""

    def end() -> None:
        if os.getpid() == process:
            finish_or_warn(PATIENCE)

    # runs before thread pools refuse new work, which is long before the functions of atexit
    register: Callable[[Callable[[], None]], object] = getattr(threading, "_register_atexit", atexit.register)
    register(end)
    return []


def finish_or_warn(seconds: float) -> None:
    """Finish all work as :func:`finish_all` does, with a warning in place of an error.

    It is used while another error is raised, and where nothing could catch one.
    """
    try:
        finish_all(seconds)
    except QuintNetError as error:
        warnings.warn(CheckpointWarning(str(error)), stacklevel=2)
