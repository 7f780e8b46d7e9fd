"""What a process has begun in the background: it is finished before the process leaves its group, or ends."""

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

PATIENCE = 600.0  # seconds that a process waits at its end for what is under way


class Unfinished(Protocol):
    """Something under way in a thread."""

    @property
    def over(self) -> bool:
        """Whether it has ended, and nobody needs to hear how."""

    def finish(self, seconds: float) -> None:
        """Wait until it has ended.

        Raises:
            QuintNetError: if it takes longer than ``seconds``; or if it failed, and nobody has heard of that.
        """


def finish_at_exit(work: Unfinished) -> None:
    """Remember ``work`` until it has ended: see :func:`finish_all`. The interpreter's exit waits for it, too."""
    there = _under_way(os.getpid())
    there[:] = [one for one in there if not one.over]
    there.append(work)


def finish_all(seconds: float) -> None:
    """Wait until all that this process has under way has ended.

    Raises:
        QuintNetError: the first one, see :meth:`Unfinished.finish`.
    """
    until, errors = time.monotonic() + seconds, list[QuintNetError]()
    there = _under_way(os.getpid())
    while there:
        try:
            there.pop(0).finish(max(0.0, until - time.monotonic()))
        except QuintNetError as error:
            errors.append(error)
    if errors:
        raise errors[0]


@lru_cache(maxsize=1)
def _under_way(process: int) -> list[Unfinished]:
    """That of this process: a forked one has nothing under way."""

    def end() -> None:
        if os.getpid() == process:
            finish_or_warn(PATIENCE)

    # before threads of pools may not begin anything any more, which is long before atexit's functions
    register: Callable[[Callable[[], None]], object] = getattr(threading, "_register_atexit", atexit.register)
    register(end)
    return []


def finish_or_warn(seconds: float) -> None:
    """As :func:`finish_all`, with a warning instead of an error: where another error is under way, or nobody could
    catch one."""
    try:
        finish_all(seconds)
    except QuintNetError as error:
        warnings.warn(CheckpointWarning(str(error)), stacklevel=2)
