"""HTML for notebooks and pages. Everything is escaped: names come from the user's model."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from .names import one_line

if TYPE_CHECKING:
    from jinja2 import Environment


@lru_cache
def environment(package: str) -> Environment:
    """Return a Jinja environment with the templates of ``package`` and the shared ones."""
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    loader = ChoiceLoader([PackageLoader(name, "templates") for name in (package, __package__)])
    return Environment(
        loader=loader, autoescape=True, finalize=_printable, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip


def page(package: str, name: str, *, title: str, script: str = "", refresh: int = 0, **variables: Any) -> str:
    """Return a self-contained page: style and pictures are in it, and a browser runs nothing but ``script``.

    Args:
        package: the package that has the template.
        name: a template of ``package`` that extends ``page.html.jinja``.
        title: the title of the page.
        script: JavaScript, which the page permits by its hash.
        refresh: seconds after which the browser reads the file again; 0: never.
        **variables: what the template shows.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment(package).get_template(name).render(
        title=title, style=Markup(_style("frame.css", "page.css")), script=Markup(script), script_digest=digest,
        refresh=refresh, **variables,
    )  # fmt: skip


def figure(package: str, name: str, **variables: Any) -> str:
    """Return a part of another page, such as a notebook, in the colours of what surrounds it.

    The style applies to this part alone.
    """
    body = environment(package).get_template(name).render(**variables)
    style = f".quintnet {{\n{_style('fragment.css', 'page.css')}}}"
    return f'<div class="quintnet"><style>{style}</style>\n{body}</div>'


@lru_cache
def _style(*names: str) -> str:
    return "".join(files(__package__).joinpath("templates", name).read_text(encoding="utf-8") for name in names)


def _printable(x: Any) -> Any:
    """Escape control characters, which XML cannot have even when they are escaped as entities."""
    return "\n".join(map(one_line, x.split("\n"))) if isinstance(x, str) and not isinstance(x, Markup) else x


def table(head: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> str:
    """Return a table for notebooks.

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
