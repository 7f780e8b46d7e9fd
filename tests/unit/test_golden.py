"""The program after each pass, as text in ``tests/golden``. ``make golden`` writes what is compared here."""

from __future__ import annotations

import difflib
from pathlib import Path

import pytest
import torch

from ..golden.programs import GOLDEN, golden_passes
from ..golden.texts import changes, texts

FOLDER = Path(__file__).parents[1] / "golden"
TORCH = (FOLDER / "torch_version.txt").read_text().strip()  # others print some operators in another way


@pytest.mark.skipif(not torch.__version__.startswith(TORCH), reason=f"the texts are of torch {TORCH}")
@pytest.mark.parametrize("name", GOLDEN)
def test_every_pass_gives_this_text(name: str, request: pytest.FixtureRequest) -> None:
    found, folder = texts(golden_passes(name)), FOLDER / name
    if request.config.getoption("--update-golden"):
        folder.mkdir(exist_ok=True)
        for file in {*folder.glob("*.txt")} - {folder / file for file in found}:
            file.unlink()
        for file, text in found.items():
            (folder / file).write_text(text)
    kept = {file.name: file.read_text() for file in sorted(folder.glob("*.txt"))}
    differing = [file for file in sorted({*kept, *found}) if kept.get(file) != found.get(file)]
    difference = [
        line
        for file in differing
        for line in difflib.unified_diff(
            kept.get(file, "").splitlines(), found.get(file, "").splitlines(), f"{name}/{file}", "now", lineterm=""
        )
    ]
    assert not differing, "\n".join(["make golden writes these texts:", *difference])


def test_what_a_pass_changes_is_shown_in_groups() -> None:
    assert changes("a\nb\nc\n", "a\nB\nc\nd\n") == "...\n-b\n+B\n...\n+d\n"
    assert changes("a\n", "a\n") == "no change\n"
