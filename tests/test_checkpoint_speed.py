"""``benchmarks/checkpoints.py``, small: it measures, and both sides restore what they saved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_checkpoints_are_measured_beside_torchs(ranks: int, tmp_path: Path) -> None:
    repeats = str(ranks)  # quartiles of one, too
    command = [sys.executable, "benchmarks/checkpoints.py", "--mib", "12", "--repeats", repeats, "--loads", "2"]
    done = subprocess.run(
        [*command, "--ranks", str(ranks), "--folder", str(tmp_path), "--json"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["ranks"], found["bytes"]) == (ranks, 3 * 4 * 1024 * 1025 + 2 * 4)
    lines = {line["what"]: line for line in found["lines"]}
    assert list(lines) == [
        *("save", "save CPU", "load", "load CPU", "load from disk", "load from disk CPU"),
        *("held", "slower", "stall"),
    ]
    for what in ("save", "save CPU", "load", "load CPU", "load from disk", "load from disk CPU", "held"):
        first, middle, last = lines[what]["quartiles"]
        assert 0 < first <= middle <= last and lines[what]["ours"] > 0 and lines[what]["theirs"] > 0
        assert (
            0 < lines[what]["least"][0] <= lines[what]["ours"] and 0 < lines[what]["least"][1] <= lines[what]["theirs"]
        )
    assert not list(tmp_path.iterdir())
