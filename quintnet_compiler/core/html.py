"""HTML for notebooks and pages. Everything is escaped: names come from the user's model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from html import escape
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from .names import one_line


@lru_cache
def environment(package: str) -> Environment:
    """The templates of ``package``."""
    loader = PackageLoader(package, "templates")
    return Environment(
        loader=loader, autoescape=True, finalize=_printable, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip


def _printable(x: Any) -> Any:
    """XML cannot have control characters at all, escaped or not."""
    return "\n".join(map(one_line, x.split("\n"))) if isinstance(x, str) and not isinstance(x, Markup) else x


def table(head: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """A table for notebooks; numbers and texts alike are cells.

    >>> table(["a"], [["<b>"]])
    '<table><thead><tr><th>a</th></tr></thead><tbody><tr><td>&lt;b&gt;</td></tr></tbody></table>'
    """
    top = f"<caption>{_cell(caption)}</caption>" if caption else ""
    if head:
        top += f"<thead><tr>{''.join(f'<th>{_cell(x)}</th>' for x in head)}</tr></thead>"
    body = "".join(f"<tr>{''.join(f'<td>{_cell(x)}</td>' for x in row)}</tr>" for row in rows)
    return f"<table>{top}<tbody>{body}</tbody></table>"


def _cell(x: object) -> str:
    return escape(one_line(str(x)))
