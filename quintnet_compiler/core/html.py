"""HTML for notebooks and pages. Everything is escaped: names come from the user's model."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from html import escape
from importlib.resources import files
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from .names import one_line


@lru_cache
def environment(package: str) -> Environment:
    """The templates of ``package``, and what all pages share."""
    loader = ChoiceLoader([PackageLoader(name, "templates") for name in (package, __package__)])
    return Environment(
        loader=loader, autoescape=True, finalize=_printable, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip


def page(package: str, name: str, *, title: str, script: str = "", refresh: int = 0, **given: Any) -> str:
    """A page that needs nothing else: style and pictures are in it, and a browser runs nothing but ``script``.

    Args:
        name: a template of ``package`` that extends ``page.html.jinja``, with what it is ``given``.
        refresh: seconds after which the browser reads the file again; 0: never.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment(package).get_template(name).render(
        title=title, style=Markup(_style("frame.css", "page.css")), script=Markup(script), script_digest=digest,
        refresh=refresh, **given,
    )  # fmt: skip


def figure(package: str, name: str, **given: Any) -> str:
    """A part of somebody else's page, such as a notebook: as :func:`page`, with a style that ends where the part ends,
    in the colours of what is around it."""
    body = environment(package).get_template(name).render(**given)
    style = f".quintnet {{\n{_style('fragment.css', 'page.css')}}}"
    return f'<div class="quintnet"><style>{style}</style>\n{body}</div>'


@lru_cache
def _style(*names: str) -> str:
    return "".join(files(__package__).joinpath("templates", name).read_text(encoding="utf-8") for name in names)


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
