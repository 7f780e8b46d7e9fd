"""Faults at operations on files: what was saved is there whole, or what an error says is true. See file_faults.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CASES_OF_A_SEED = 25
TIMEOUT_SECONDS = 900


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile what stands between Python and libc."""
    path = tmp_path_factory.mktemp("faults") / "file_faults.so"
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", str(path), str(ROOT / "tests/file_faults.c"), "-ldl"]
    subprocess.run(command, check=True, timeout=120)
    return path


@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD")
@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(40))
def test_drawn_faults_in_files(seed: int, library: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "tests.file_faults", str(seed), str(CASES_OF_A_SEED)],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    *problems, summary = result.stdout.splitlines()
    assert problems == []
    counts = json.loads(summary)
    assert counts["cases"] == CASES_OF_A_SEED and counts["met"] > CASES_OF_A_SEED // 4
