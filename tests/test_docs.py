"""What the documents say is true: their Python runs, and they name every error."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from quintnet_compiler.core.error_help import error_page
from quintnet_compiler.runtime.launch.attempt import PRELOADED

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _code(page: Path) -> str:
    """All Python of a page, as one program; blocks marked ``no-run`` are left out."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.S | re.M))


@pytest.mark.sample(7)
@pytest.mark.parametrize("page", [page for page in PAGES if _code(page)], ids=lambda page: page.name)
def test_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    """In a process of its own, forked from one that has imported what all pages import."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    said = tmp_path / "stderr"
    process = context.Process(target=_run, args=(_code(page), tmp_path, said))
    process.start()
    process.join(120)
    if process.exitcode is None:
        process.kill()
        process.join()
    assert process.exitcode == 0, said.read_text()[-2000:]


def _run(code: str, folder: Path, said: Path) -> None:
    with said.open("w") as file:
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    os.environ["PATH"] = ""
    torch.set_num_threads(1)
    exec(compile(code, "page", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (page.parent / target).exists(), target


def test_every_error_is_documented() -> None:
    """`quintnet explain errors > docs/errors.md` makes the page."""
    assert (ROOT / "docs/errors.md").read_text() == f"{error_page()}\n"


def test_screenshots_are_those_that_pages_ask_for() -> None:
    pictures, screenshots = _script("pictures"), _script("screenshots")
    asked = {name for page in PAGES for name, _ in pictures.SHOT.findall(page.read_text())}
    assert asked == set(screenshots.SHOTS)
    assert pictures.on_page_markdown("```python no-run\nx\n```\n") == "```python\nx\n```\n"
    assert pictures.on_page_markdown("a\n\n<!-- screenshot nothing: of this name -->\n\nb") == "a\n\n\n\nb"


@pytest.mark.slow
def test_pictures_are_drawn_by_one_script_and_shown_on_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python docs/draw_pictures.py` draws them."""
    script = _script("draw_pictures")
    shown = {name for page in PAGES for name in re.findall(r"\]\(pictures/(\w+)\.svg\)", page.read_text())}
    assert shown == set(script.PICTURES) == {path.stem for path in (ROOT / "docs/pictures").iterdir()}
    name = "column_parallel_weight"
    monkeypatch.setattr(sys, "argv", ["draw_pictures.py", "--out", str(tmp_path), "--only", name])
    script.main()
    assert (tmp_path / f"{name}.svg").read_text() == (ROOT / f"docs/pictures/{name}.svg").read_text()


def test_without_a_browser_there_are_no_screenshots(monkeypatch: pytest.MonkeyPatch) -> None:
    screenshots = _script("screenshots")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "argv", ["screenshots.py"])
    with pytest.raises(SystemExit, match=r"none of chromium, .* is on the PATH"):
        screenshots.main()
    sys.argv.append("--if-possible")
    screenshots.main()


def _script(name: str) -> Any:
    """A script of the documentation, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / f"docs/{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
