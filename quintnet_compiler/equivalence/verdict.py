"""Compare a program with the module on one rank while the others compile, and raise its error on every rank."""

from __future__ import annotations

import json
from collections.abc import Callable

from ..core.errors import CompileError, Where
from ..runtime.backends.backend import Backend
from ..runtime.launch.world import judges, many


class Verdict:
    """The result of a comparison, until every rank has it."""

    def __init__(self) -> None:
        self._due = False
        self._found: CompileError | None = None

    def judge(self, find: Callable[[], CompileError | None]) -> None:
        """On one rank, look for a difference. Every rank calls this for the same programs.

        Raises:
            CompileError: QN111 if this is the only process. With several, :meth:`raise_error_of_any_rank` raises it.
        """
        difference = find() if judges() else None
        if difference is not None and not many():
            raise difference
        self._due = self._due or many()
        self._found = self._found or difference

    def raise_error_of_any_rank(self, backend: Backend) -> None:
        """Raise the error of any rank. Every rank calls this before it runs a program.

        Raises:
            CompileError: QN111 on every rank if one of them found a difference.
        """
        if not self._due:
            return
        errors = [text for text in backend.told(_written(self._found)) if text]
        if errors:
            raise _read(errors[0])
        self._due = False


def _written(error: CompileError | None) -> str:
    if error is None:
        return ""
    where = error.where or Where()
    return json.dumps([error.code, error.message, where.module, where.source, error.fix])


def _read(text: str) -> CompileError:
    code, message, module, source, fix = json.loads(text)
    return CompileError(code, message, where=Where(module, source), fix=fix)
