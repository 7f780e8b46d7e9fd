"""A hook of mkdocs: runs the code of a page, and shows each SVG file that it writes beneath the block that names it.

Where a page asks for a screenshot, it is shown if screenshots.py took it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.S | re.M)
SHOT = re.compile(r"^<!-- screenshot ([\w-]+): (.*) -->$", re.M)  # on a page of the top folder
NAMED = re.compile(r"open\(f?\"([\w{}/:. ]+)\.svg\", \"w\"\)")


def on_page_markdown(markdown: str, /, **_: Any) -> str:
    # a mark for the tests, which mkdocs does not know: it would take all that follows for code
    return _drawn(SHOT.sub(_screenshot, markdown)).replace("```python no-run\n", "```python\n")


def _drawn(markdown: str) -> str:
    blocks = BLOCK.findall(markdown)
    if not any(NAMED.search(block) for block in blocks):
        return markdown
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [sys.executable, "-c", "\n".join(blocks)],
            cwd=folder,
            check=True,
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        drawn = {path.name: path.read_text() for path in sorted(Path(folder).glob("*.svg"))}

    def shown(block: re.Match[str]) -> str:
        # a name may be an f-string: every file that fits it
        patterns = [re.sub(r"\\{[^}]*\\}", ".*", re.escape(name)) for name in NAMED.findall(block[1])]
        fitting = [name for name in drawn if any(re.fullmatch(f"{pattern}\\.svg", name) for pattern in patterns)]
        pictures = [f'<figure markdown="0">{_inline(drawn.pop(name))}</figure>' for name in fitting]
        return block[0] + "".join(f"\n{picture}\n" for picture in pictures)

    return BLOCK.sub(shown, markdown)


def _screenshot(asked: re.Match[str]) -> str:
    there = (Path(__file__).parent / f"screenshots/{asked[1]}.png").is_file()
    return f"![{asked[2]}](screenshots/{asked[1]}.png)" if there else ""


def _inline(svg: str) -> str:
    """Without what a file of its own needs, and without blank lines, at which Markdown would begin to read it."""
    body = svg[svg.index("<svg") :]
    return "\n".join(line for line in body.splitlines() if line.strip())
