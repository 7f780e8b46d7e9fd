"""The report on one GPU, made on the emulated accelerator: every part runs, and what fails does not stop the others."""

from __future__ import annotations

import html
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from .accelerator.build import missing

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))
from gpu_report import layouts, memory, races, shared_device  # noqa: E402
from gpu_report.driver import last_error, run_part, write  # noqa: E402
from gpu_report.entries import Check, Figures, NotRun, entry_of, line_of  # noqa: E402
from gpu_report.page import shown  # noqa: E402
from gpu_report.parts import PARTS, Part  # noqa: E402
from gpu_report.peers import idle_share  # noqa: E402

pytestmark = pytest.mark.skipif(missing() is not None, reason=f"the emulated accelerator: {missing()}")


@pytest.mark.slow
def test_all_parts_on_the_emulated_accelerator(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/first_gpu.py", "--emulated", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    report = json.loads((tmp_path / "report.json").read_text())
    assert done.returncode == 0, [(part["name"], part["why"], part["tail"]) for part in report["parts"] if part["why"]]
    found = {part["name"]: part for part in report["parts"]}
    usual = [part for part in PARTS if part.usual]
    assert list(found) == [part.name for part in usual]
    assert {name: part["verdict"] for name, part in found.items()} == {
        **{part.name: "passed" for part in usual},
        "graphs": "not run",  # the emulated accelerator has none
        "starts": "not run",  # takes CUDA devices
    }
    for name in ("layouts", "process_group", "shared_device", "races", "features", "memory"):
        assert len(found[name]["checks"]) >= 2, name
    peers = [row for rows in found["slices"]["tables"].values() for row in rows if "peer" in row]
    assert {row["peer"] for row in peers} == {"eager", "plain"} and all(row["kernels"] > 0 for row in peers)
    assert found["graphs"]["not_run"] and found["slices"]["not_run"]
    page = html.unescape((tmp_path / "index.html").read_text())
    assert all(part.title in page for part in usual) and "emulated accelerator" in page


def test_half_an_hour_is_enough_as_the_page_says() -> None:
    assert sum(part.seconds for part in PARTS if part.usual) == 30 * 60
    page = (ROOT / "docs/gpus.md").read_text()
    assert [part.name for part in PARTS if f"| `{part.name}` | {part.seconds} |" not in page] == []


def test_the_page_counts_the_layouts() -> None:
    page = (ROOT / "docs/gpus.md").read_text()
    exact, rounded, two = (_sampled(jobs) for jobs in (layouts.EXACT, layouts.ROUNDED, shared_device.TWO))
    shared = len(shared_device.TWO) + len(shared_device.FOUR)
    assert f"| {len(layouts.EXACT)} layouts of" in page and f"; {len(layouts.ROUNDED)} more in bf16" in page
    assert f"| {exact}, and {rounded} in bf16 |" in page
    assert f"| {two} of {shared}, on 2 processes |" in page and not _sampled(shared_device.FOUR)
    assert f"| {_sampled(races.JOBS)} of {len(races.JOBS)} layouts |" in page
    assert f"for {len(memory.PLANS)} plans over {memory.STEPS} steps" in page
    assert f"| {len(memory.SAMPLE)} plans |" in page


def _sampled(jobs: Sequence[layouts.Job]) -> int:
    return sum(job.sample for job in jobs)


def test_a_part_that_fails_says_why(tmp_path: Path) -> None:
    unknown = run_part(Part("unknown", "Unknown", "nothing", 60), tmp_path, emulated=True)
    assert unknown.verdict == "failed" and unknown.why == "it ended with exit code 1: KeyError: 'unknown'"
    assert "Traceback" in unknown.tail
    late = run_part(Part("layouts", "Late", "nothing", 0), tmp_path, emulated=True)
    assert late.verdict == "failed" and late.why == "it was not done after 0 s"
    write([unknown, late], tmp_path, emulated=True)
    told = json.loads((tmp_path / "report.json").read_text())["parts"]
    assert [part["verdict"] for part in told] == ["failed", "failed"]
    assert "KeyError" in (tmp_path / "index.html").read_text()


def test_entries_are_lines() -> None:
    for entry in (Check("a", False, "1 < 2"), Figures("t", {"ms": 1.5, "peer": "plain"}), NotRun("b", "no CUDA")):
        assert entry_of(line_of(entry)) == entry


def test_numbers_of_the_page() -> None:
    assert [shown(x) for x in (1234.5, 12.345, 0.00123, 3, "tp")] == ["1234", "12.3", "0.00123", "3", "tp"]
    assert idle_share([(0, 2), (1, 3), (5, 10)]) == pytest.approx(0.2)
    assert idle_share([]) is None
    assert (
        last_error("Traceback (most recent call last):\n  File ...\nValueError: no\nat the end\n") == "ValueError: no"
    )


RACE = """
import os, sys
sys.path[:0] = [{root!r}, {root!r} + "/benchmarks"]
from gpu_report import late, races
from gpu_report.setting import Setting

late.LateTransport._later = lambda self, made, *kept: lambda: made  # a wait that does not wait
races.JOBS, races._waits = races.JOBS[:1], lambda setting: ()
print([entry.good for entry in races.run(Setting.here(emulated=True))], flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_a_missing_wait_is_a_race() -> None:
    command = [sys.executable, "-c", RACE.format(root=str(ROOT))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.strip() == "[False]", done.stderr[-2000:]
