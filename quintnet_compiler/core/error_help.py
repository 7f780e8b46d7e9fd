"""What each error means: ``quintnet explain QN203``, and the page docs/errors.md."""

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
        return json.dumps(asdict(self), indent=2)

    def __str__(self) -> str:
        return f"{self.id} {self.summary}\n\n{self.why}\n\nWhat to do: {self.fix}"


@dataclass(frozen=True)
class ErrorPage:
    """All errors."""

    errors: tuple[ErrorHelp, ...]

    def to_json(self) -> str:
        return json.dumps([asdict(one) for one in self.errors], indent=2)

    def __str__(self) -> str:
        """docs/errors.md."""
        lines, family = [_PAGE], ""
        for one in self.errors:
            if one.id[:3] != family:
                family = one.id[:3]
                lines.append(f"## {family}xx: {_FAMILIES[family]}\n")
            lines.append(f"### {one.id}: {one.summary}\n\n{one.why}\n\n**What to do.** {one.fix}\n")
        return "\n".join(lines).rstrip()


def error_page() -> ErrorPage:
    return ErrorPage(tuple(ErrorHelp(code, one.summary, one.why, one.fix) for code, one in ERRORS.items()))


def error_help(code: str) -> ErrorHelp | tuple[str, ...]:
    """Help for an error's id (upper or lower case), or the ids that look like it."""
    found = code.strip().upper()
    if found in ERRORS:
        one = ERRORS[found]
        return ErrorHelp(found, one.summary, one.why, one.fix)
    return tuple(difflib.get_close_matches(found, ERRORS, n=3))
