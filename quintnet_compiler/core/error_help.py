"""Help for each error: ``quintnet explain QN203``, and the page docs/errors.md."""

from __future__ import annotations

import difflib
import json
from dataclasses import asdict, dataclass

from .error_table import ERRORS

_FAMILIES = {
    "QN1": "Capture and input", "QN2": "Mesh, plan and layout", "QN3": "Launch", "QN4": "Communication",
    "QN5": "Numerics", "QN6": "Weights on disk", "QN7": "Security",
}  # fmt: skip
_PAGE = """# Errors

Every error has a stable code, the place in your model, the numbers, and a fix. `quintnet explain QN203` prints an entry
of this page, `quintnet explain errors` all of it. Exact messages are in `tests/test_errors.py`.
"""


@dataclass(frozen=True)
class ErrorHelp:
    """An error's id, what it says, why it happens, and what to do."""

    id: str
    summary: str
    why: str
    fix: str

    def to_json(self) -> str:
        """Return the fields as JSON."""
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        """Return the text for a terminal."""
        return f"{self.id} {self.summary}\n\n{self.why}\n\nWhat to do: {self.fix}"


@dataclass(frozen=True)
class ErrorPage:
    """All errors."""

    errors: tuple[ErrorHelp, ...]

    def to_json(self) -> str:
        """Return the errors as a JSON list."""
        return json.dumps([asdict(error) for error in self.errors], indent=2)

    def __str__(self) -> str:
        """Return docs/errors.md."""
        lines, family = [_PAGE], ""
        for error in self.errors:
            if error.id[:3] != family:
                family = error.id[:3]
                lines.append(f"## {family}xx: {_FAMILIES[family]}\n")
            lines.append(f"### {error.id}: {error.summary}\n\n{error.why}\n\n**What to do.** {error.fix}\n")
        return "\n".join(lines).rstrip()


def error_page() -> ErrorPage:
    """Return the help of all errors."""
    return ErrorPage(tuple(ErrorHelp(code, entry.summary, entry.why, entry.fix) for code, entry in ERRORS.items()))


def error_help(code: str) -> ErrorHelp | tuple[str, ...]:
    """Return the help for an error's id (upper or lower case), or the ids that look like it."""
    code = code.strip().upper()
    if code in ERRORS:
        entry = ERRORS[code]
        return ErrorHelp(code, entry.summary, entry.why, entry.fix)
    return tuple(difflib.get_close_matches(code, ERRORS, n=3))
