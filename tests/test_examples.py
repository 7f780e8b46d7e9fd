"""The example scripts, on a few images: they run as their help says, and their exit code says what was missed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
FEW = ["--local", "--epochs", "1", "--limit", "128"]


def _run(script: str, *given: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / script), *FEW, *given]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow
def test_resnet(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    done = _run("train_resnet.py", "--dump", str(tmp_path))
    assert "largest relative difference" in done.stdout, done.stderr
    assert done.returncode == 1 and done.stdout.count("MISSED") == 1 and "is below 95%" in done.stdout


def test_diffusion_draws_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    done = _run("train_diffusion.py", "--out", str(tmp_path))
    assert "2 ranks against the unsplit model: equal" in done.stdout, done.stderr
    assert done.returncode == 1 and done.stdout.count("MISSED") == 1  # one epoch is too few
    picture = (tmp_path / "digits.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n") and picture[16:24] == bytes([0, 0, 1, 144] * 2)  # 400 x 400
