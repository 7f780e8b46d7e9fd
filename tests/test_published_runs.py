"""``benchmarks/published_runs.py`` as a script: its JSON has the same fields whatever the rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_published_runs_prints_its_fixed_face(tmp_path: Path) -> None:
    lines = (ROOT / "benchmarks/data/published_runs.csv").read_text().splitlines()
    few = tmp_path / "few.csv"
    few.write_text(
        "\n".join([lines[0], *(line for line in lines if line.startswith(("KORTH", "NEMOLAUNCH-5B-64", "BLOOM-009")))])
    )
    ran = subprocess.run(
        [sys.executable, "benchmarks/published_runs.py", "--rows", few, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    keys = {"id", "predicted_step_s", "step_time_error", "predicted_memory_gib", "memory_error", "skipped"}
    assert all(set(row) == keys for row in found["rows"]) and len(found["rows"]) == 6
    by_id = {row["id"]: row for row in found["rows"]}
    assert "not stated" in by_id["NEMOLAUNCH-5B-64"]["skipped"]
    assert by_id["NEMOLAUNCH-5B-64"]["predicted_step_s"] is None
    assert abs(by_id["BLOOM-009"]["memory_error"]) < 0.2
    assert found["summary"]["step_time"]["source KORTH"]["mean"] < 0.037
