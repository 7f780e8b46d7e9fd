"""Errors about changes that forward makes while it is traced, and that a program would not."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from ...core.errors import CompileError, Where
from ...guards.python_state import FORWARD, Change


def changed_by_trace(changes: Sequence[Change], line: str) -> CompileError:
    """Return an error about changes; ``line``: the one that made the first."""
    first, more = changes[0], len(changes) - 1
    path = str(first).partition("'")[2].partition("'")[0]
    module = path.rpartition(".")[0] if first.by == FORWARD else ""
    also = f" (and {more} more: {', '.join(str(change) for change in changes[1:4])})" if more else ""
    if first.of_process:
        others = "; if forward draws none, another thread did: let it wait" if threading.active_count() > 1 else ""
        what = (
            f"draws random numbers in Python: it changes {first}{also}; a program would have drawn them once, "
            "when it was made"
        )
        return refused(what, line, f"draw them outside and pass them in the batch{others}")
    return CompileError(
        "QN110",
        f"{first.by} changes {first}{also}; a program would not",
        where=Where(module, line),
        fix="if only its first call does so, as with a table that it keeps: call model(*batch) once under "
        "torch.no_grad() before you compile"
        if first.by == FORWARD
        else "",
    )


def refused(what: str, line: str, fix: str = "") -> CompileError:
    """Return the error of a forward pass that does at ``line`` what a program would not."""
    return CompileError("QN110", f"the forward pass {what}", where=Where("", line), fix=fix)
