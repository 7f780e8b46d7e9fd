"""Background work of a process, which is finished before the process leaves its group, or ends."""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import dataclass, field
from typing import Protocol

from ...compat.interpreter import call_once, run_before_exit
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
    """Remember ``work`` until it has ended: see :func:`finish_all`.

    The interpreter's exit waits for it, too. Of work that begins later, in a function of :mod:`atexit`, this waits.
    """
    tasks = _tasks_of(os.getpid())
    tasks.unfinished = [task for task in tasks.unfinished if not task.over] + [work]
    if tasks.ending:
        finish_or_warn(PATIENCE)


def finish_all(seconds: float) -> None:
    """Wait until all background work of this process has ended.

    Raises:
        QuintNetError: the first one, see :meth:`Unfinished.finish`.
    """
    deadline, errors = time.monotonic() + seconds, list[QuintNetError]()
    unfinished = _tasks_of(os.getpid()).unfinished
    while unfinished:
        try:
            unfinished.pop(0).finish(max(0.0, deadline - time.monotonic()))
        except QuintNetError as error:
            errors.append(error)
    if errors:
        raise errors[0]


@dataclass
class _Tasks:
    """Background work of a process. ``ending``: whether the interpreter ends, and will not wait for more of it."""

    unfinished: list[Unfinished] = field(default_factory=list)
    ending: bool = False


@call_once
def _tasks_of(process: int) -> _Tasks:
    """Return a process's work, none in a forked process, and have it finished at exit."""
    tasks = _Tasks()

    def end() -> None:
        tasks.ending = True
        if os.getpid() == process:
            finish_or_warn(PATIENCE)

    tasks.ending = not run_before_exit(end)
    return tasks


def finish_or_warn(seconds: float) -> None:
    """Finish all work as :func:`finish_all` does, with a warning in place of an error.

    It is used while another error is raised, and where nothing could catch one.
    """
    try:
        finish_all(seconds)
    except QuintNetError as error:
        warnings.warn(CheckpointWarning(str(error)), stacklevel=2)
