"""Errors that users see: a stable id, the place in the user's model, the numbers, and a fix.

Also checks of numbers that users pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from .error_table import ERRORS

# the fix of an error that is a mistake of the compiler
REPORT = "a mistake of QuintNet: open an issue (template: bug) with the model and what `quintnet doctor` prints"


@dataclass(frozen=True)
class Where:
    """A place in the user's model: the module path and the line of source that made an operator."""

    module: str = ""
    source: str = ""

    def __str__(self) -> str:
        """Return the module path and the source line, as far as they are set."""
        return "  ".join(part for part in (self.module, self.source) if part)


def printable(text: str) -> str:
    r"""Escape everything but text and line breaks, so that a terminal can show it.

    Errors quote other processes, files and names.

    >>> printable("rank 1: \x1b[2Jred")
    'rank 1: \\x1b[2Jred'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


class QuintNetError(Exception):
    """Base of every error that QuintNet raises on purpose.

    Attributes:
        code: a stable id (``QN203``).
        message: what was established, with numbers.
        where: the place in the user's model.
        fix: a suggestion.
    """

    def __init__(self, code: str, message: str, *, where: Where | None = None, fix: str = "") -> None:
        """Build the text from the error's summary, ``message``, ``where`` and ``fix``."""
        message = printable(message)
        self.code, self.message, self.where, self.fix = code, message, where, fix
        lines = [f"{code} {ERRORS[code].summary}", f"  {message}"]
        if where is not None and str(where):
            lines.append(f"  at: {where}")
        if fix:
            lines.append(f"  fix: {fix}")
        super().__init__(printable("\n".join(lines)))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the arguments of ``__init__``: errors cross process borders (quintnet.launch)."""
        return _rebuild, (type(self), self.code, self.message, self.where, self.fix)


def _rebuild(kind: type[QuintNetError], code: str, message: str, where: Where | None, fix: str) -> QuintNetError:
    return kind(code, message, where=where, fix=fix)


class CompileError(QuintNetError, ValueError):
    """The model, the mesh or the plan cannot be compiled. Raised before anything runs."""


class InputError(QuintNetError, ValueError):
    """A batch does not fit the compiled program. Raised before anything runs."""


class RunError(QuintNetError, RuntimeError):
    """Something went wrong while ranks were running."""


class BackendWarning(UserWarning):
    """A backend cannot compile a segment of a program, or capture it in a CUDA graph. The segment runs without."""


class CheckpointError(QuintNetError, ValueError):
    """Weights or a checkpoint cannot be read or written, or do not fit the model. No parameter was changed."""


class CacheWarning(UserWarning):
    """A compiled program is not taken from the folder given as ``cache``, or not kept there."""


class CheckWarning(UserWarning):
    """A program could not be compared with its module; or ranks have equal rows, or unlike settings, by mistake."""


class CompileWarning(UserWarning):
    """A module is traced again and again, because batches differ in more than their sizes."""


class CheckpointWarning(UserWarning):
    """A checkpoint is damaged, and another one is used; or a run goes on otherwise than it would have."""


class FaultWarning(UserWarning):
    """A rank failed, and all ranks are started again."""


class LogWarning(UserWarning):
    """A log of a run cannot be written: the run goes on. Each log says so once."""


def whole_number(value: Any) -> int | None:
    """Return ``value`` as an int; None if it is no whole number (a bool is none, nor is a tensor or a text).

    >>> whole_number(3), whole_number(True), whole_number(3.0), whole_number("3")
    (3, None, None, None)
    """
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def finite(value: Any) -> float | None:
    """Return ``value`` as a float; None if it is no real number, is NaN, or exceeds what a float holds.

    >>> finite(3), finite(True), finite(float("inf")), finite("3"), finite(10**400)
    (3.0, None, None, None, None)
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def describe_value(value: Any) -> str:
    """Return ``value`` as an error message shows it: its text, cut short, and its type.

    >>> describe_value("1.5"), describe_value([1] * 99)
    ("'1.5', a str", '[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1..., a list')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}, not an object"
    try:
        text = repr(value)
    except Exception:  # its own text may fail in any way; an int of very many digits has none
        text = "something without a text"
    return f"{text if len(text) <= 60 else f'{text[:39]}...'}, {_article(type(value).__name__)}"


def _article(name: str) -> str:
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"
