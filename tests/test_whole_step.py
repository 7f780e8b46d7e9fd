"""benchmarks/whole_step.py: all peers begin with the same loss."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent / "benchmarks/whole_step.py"


def test_peers_train_the_same_model_on_the_same_tokens() -> None:
    peers = ["quintnet-eager", "transformers", "torchtitan"]
    options = ["--model", "tiny", "--sequence", "32", "--device", "cpu", "--steps", "1", "--peers", ",".join(peers)]
    run = subprocess.run(
        [sys.executable, str(SCRIPT), *options], capture_output=True, text=True, timeout=300, env=dict(os.environ)
    )
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert [row["peer"] for row in rows] == peers, run.stderr[-2000:]
    assert max(row["first loss"] for row in rows) - min(row["first loss"] for row in rows) < 1e-5
