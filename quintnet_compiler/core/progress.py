"""Progress for people: on a terminal only, on stderr, and erased when it is over. Rich honours NO_COLOR."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar

_quiet: ContextVar[bool] = ContextVar("quintnet_hush", default=False)


@contextlib.contextmanager
def hushed(quiet: bool = True) -> Iterator[None]:
    """Show nothing while inside."""
    token = _quiet.set(quiet)
    try:
        yield
    finally:
        _quiet.reset(token)


def seen() -> bool:
    """Return whether somebody watches this process: stderr is a terminal, and it is not one of many ranks."""
    return not _quiet.get() and sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def working(what: str) -> Iterator[None]:
    """Show ``what`` with a spinner while inside."""
    if not seen():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(what):
        yield


@contextlib.contextmanager
def bar(what: str, shown: bool | None = None) -> Iterator[Callable[[int, int], None]]:
    """Yield a function (done, total) that moves a progress bar.

    ``shown``: by default where somebody watches (:func:`seen`).
    """
    if not (seen() if shown is None else shown):
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
