"""The error of a failed check."""

from __future__ import annotations

from torch import fx

from ..core.annotations import facts
from ..core.annotations import has_facts as is_annotated
from ..core.errors import REPORT, CompileError


def check_failure(check: str, message: str, node: fx.Node | None = None) -> CompileError:
    """Return error QN209, with the place in the user's source from which ``node`` comes, if it has one."""
    where = facts(node).where if node is not None and is_annotated(node) else None
    return CompileError("QN209", f"{check}: {message}", where=where, fix=REPORT)
