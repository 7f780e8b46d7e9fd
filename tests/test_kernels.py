"""The kernels of a layer of Llama-3 70B, and what it sends, are those of docs/gpu_measurements.md."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NAMES = {
    "matmuls": "matmul", "matmuls, of weights' gradients": "matmul, of weights' gradients", "norms": "norm",
    "SwiGLU": "activation", "residuals, and sums of gradients": "residual, and sums of gradients",
    "sums of norms' gradients": "sums of weights' gradients", "**all**": "all",
}  # fmt: skip


def _printed(*options: str) -> dict[str, list[float]]:
    """The numbers of each row: once a step, forward, backward."""
    pytest.importorskip("transformers")
    command = [sys.executable, "benchmarks/kernels.py", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = re.findall(r"^(\S.*?) +([\d.]+) +([\d.]+) +([\d.]+)$", done.stdout, re.M)
    return {name: [float(x) for x in numbers] for name, *numbers in rows}


@pytest.mark.slow
def test_the_documented_kernels_are_counted() -> None:
    found = _printed()
    page = (ROOT / "docs" / "gpu_measurements.md").read_text().partition("## Kernels of a layer")[2]
    rows = re.findall(r"^\| ([^|]+) \| \**(\d*)\** ?\| \**(\d+)\** \|$", page, re.M)
    told = {NAMES.get(name, name): [float(x or 0) for x in numbers] for name, *numbers in rows}
    assert told == {name: numbers[1:] for name, numbers in found.items() if name in told}
    assert sum(forward for name, (forward, _) in told.items() if name != "all") == told["all"][0] <= 30
    assert sum(backward for name, (_, backward) in told.items() if name != "all") == told["all"][1] <= 55


@pytest.mark.slow
def test_the_documented_kernels_of_inductor_are_counted() -> None:
    found = _printed("--backend", "inductor")
    page = (ROOT / "docs" / "gpu_measurements.md").read_text()
    told = re.search(r"(\d+) kernels forward and (\d+) backward, of which (\d+) and (\d+) are its own", page)
    assert told is not None
    assert [float(x) for x in told.groups()] == [*found["all"][1:], *found["fused by inductor"][1:]]


@pytest.mark.slow
@pytest.mark.parametrize("options", ["--mesh tp=8", "--mesh dp=8", "--mesh dp=8 --zero 1", "--mesh dp=8 --zero 3"])
def test_no_layer_sends_more_than_it_has_to(options: str) -> None:
    found = _printed(*options.split())
    assert found["MiB that a rank sends"] == found["the least"]
    assert max(found["the least"]) > 0
