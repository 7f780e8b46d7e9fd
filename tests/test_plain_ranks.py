"""Ranks of scripts without launch: who is elsewhere, stopped or gone is named, and soon."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from .test_launchers import ROOT, TOLD, _clean

LINE = r"\S*plain_ranks\.py:\d+"
SAID = {
    "save": rf"QN401 .*\n  rank 0 is in step 3 at {LINE}, rank 1 is in save at {LINE}",
    "kill": r"QN402 .*\n  step 3: .*(nothing is heard of ranks 1|rank 1 has ended in step 2 )",
    "stop": r"QN303 .*\n  rank 1 was stopped \(SIGSTOP\) in step 2 \(pid \d+ on \S+\)",
    "raise": r"(QN402 .*\n  step 3|rank 0 ends): rank 1 raised ValueError: no more rows",
    "finish": rf"QN402 .*\n  rank 1 has finished after step 2; rank 0 is in step 3 at {LINE}",
}


@pytest.mark.slow
@pytest.mark.parametrize("what", SAID)
def test_what_the_other_rank_says(what: str, tmp_path: Path) -> None:
    """As srun starts them: nobody ends the other one."""
    command = [sys.executable, "-m", "tests.plain_ranks", what, str(tmp_path)]
    ranks = [
        subprocess.Popen(command, cwd=ROOT, env={**_clean(), **TOLD["srun"](rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    lines, named = list[str](), 0.0
    assert ranks[0].stderr is not None
    for line in ranks[0].stderr:
        lines.append(re.sub(r"^\[rank0\]: ", "", line))
        if not named and re.search(SAID[what], "".join(lines)):
            named = time.time() - float((tmp_path / "when").read_text())
    code = ranks[0].wait(100)
    if ranks[1].poll() is None:
        ranks[1].kill()
    ranks[1].communicate()
    assert 0 < named < 5 and code == 1, f"named after {named:.1f} s\n" + "".join(lines)
    print(f"{what}: named after {named:.1f} s")


@pytest.mark.slow
def test_a_process_that_needs_no_other_one_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.plain_ranks", "end", str(tmp_path)]
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**_clean(), **TOLD["srun"](rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=100) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert said[0] == ("rank 0 has written its report\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["kill", "stop", "raise"])
def test_torchrun_ends_when_one_rank_is_lost(what: str, tmp_path: Path) -> None:
    options = ["--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "tests.plain_ranks", what, str(tmp_path)]
    made = subprocess.run(command, cwd=ROOT, env=_clean(), stderr=subprocess.PIPE, text=True, timeout=150)
    took = time.time() - float((tmp_path / "when").read_text())
    assert made.returncode == 1 and took < 15, f"{took:.1f} s\n{made.stderr}"
    if what == "stop":
        assert re.search(SAID["stop"], made.stderr), made.stderr
    print(f"{what}: torchrun ended after {took:.1f} s")
