"""The benchmark of one rank's program runs, whatever collectives the program has."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.parametrize(("mesh", "rows"), [("tp=4", 8), pytest.param("dp=2,cp=2,pp=2", 16, marks=pytest.mark.slow)])
def test_one_rank_alone(mesh: str, rows: int) -> None:
    given = ["--model", "tiny", "--mesh", mesh, "--rank", "0", "--rows", str(rows), "--steps", "1", "--json"]
    command = [sys.executable, "one_rank.py", *given, "--peers", "eager,plain"]
    done = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)["peers"]
    assert all(found[peer]["ms"] > 0 for peer in ("eager", "plain"))
