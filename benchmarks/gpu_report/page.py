"""The report as a page, which needs no network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader


def page(document: dict[str, Any]) -> str:
    """The page of what :func:`.driver.write` collected."""
    source = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=source, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["shown"] = shown
    counts = {verdict: sum(part["verdict"] == verdict for part in document["parts"]) for verdict in VERDICTS}
    return environment.get_template("page.html.jinja").render(report=document, counts=counts)


VERDICTS = ("passed", "failed", "not run")


def shown(cell: Any) -> str:
    """A number with three digits or so.

    >>> [shown(x) for x in (1234.5, 12.345, 0.00123, 3, "tp")]
    ['1234', '12.3', '0.00123', '3', 'tp']
    """
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:.0f}" if abs(cell) >= 1000 else f"{cell:.3g}"
