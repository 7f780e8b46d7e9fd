"""A folder that nothing may change, and a program to dump."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import quintnet

from . import Keyed, Outside, compile_keyed


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Outside]:
    """Runs a test in an empty folder, then looks for the marker and for changes around it."""
    found = Outside(tmp_path)
    monkeypatch.chdir(found.work)
    yield found
    found.check()


@pytest.fixture(scope="module")
def program() -> quintnet.CompiledProgram:
    return compile_keyed(Keyed())
