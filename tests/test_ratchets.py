"""Complexity, vague names, fragments of docstrings, long files: what tests/ratchets.toml lists only shrinks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _tool() -> ModuleType:
    """Load tools/ratchets.py, which no package has."""
    path = Path(__file__).parents[1] / "tools/ratchets.py"
    spec = importlib.util.spec_from_file_location("ratchets", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


ratchets = _tool()
FILES = ratchets.product_files()
ALLOWED = ratchets.limits()


@pytest.mark.parametrize("measure", ratchets.MEASURES)
def test_nothing_becomes_larger_and_limits_follow_what_becomes_smaller(measure: str) -> None:
    counts = ratchets.MEASURES[measure](FILES)
    assert ratchets.larger(counts, ALLOWED[measure]) == {}, "larger than tests/ratchets.toml allows"
    assert ratchets.smaller(counts, ALLOWED[measure]) == {}, "run: python tools/ratchets.py --lower"


def test_what_is_compared() -> None:
    assert ratchets.larger({"a": 2, "b": 1, "new": 1}, {"a": 1, "b": 1}) == {"a": "2 > 1", "new": "1 > 0"}
    assert ratchets.smaller({"a": 1}, {"a": 2, "gone": 3}) == {"a": "1 < 2", "gone": "0 < 3"}
    code = ratchets.ast.parse("def f(x):\n    assert x and (1 if x else 2)\n    return [y for y in x]")
    assert ratchets.decisions(code) == 5
