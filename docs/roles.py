"""A hook of mkdocs: names in docstrings, which are written as :class:`.Name` for editors, without the role."""

from __future__ import annotations

import re
from typing import Any

ROLE = re.compile(r":(?:attr|class|func|meth|mod):<code>[~.]*([^<]*)</code>")


def on_page_content(html: str, /, **_: Any) -> str:
    return ROLE.sub(r"<code>\1</code>", html)
