"""The report's part on several ranks of NCCL on one device: over gloo on CPUs, and why it is left out."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))
from gpu_report import nccl_ranks, rank_work  # noqa: E402
from gpu_report.entries import Check, Entry, NotRun  # noqa: E402
from gpu_report.rank_processes import Ended, Launcher  # noqa: E402
from gpu_report.setting import Setting  # noqa: E402


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher("cpu", {"GLOO_SOCKET_IFNAME": "lo"}, tmp_path)


def _good(entries: list[Entry]) -> list[str]:
    bad = [entry for entry in entries if not (isinstance(entry, Check) and entry.good)]
    assert not bad
    return [entry.what for entry in entries if isinstance(entry, Check)]


@pytest.mark.slow
def test_collectives_of_two_ranks(launcher: Launcher) -> None:
    found = launcher.run("collectives", 2, 200).merged
    assert _good([*found]) == ["8 collectives of 2 ranks, at once", "8 collectives of 2 ranks, started"]


@pytest.mark.slow
def test_a_layout_of_four_ranks(launcher: Launcher) -> None:
    (sampled,) = [f"{job}, 4 ranks" for job in rank_work.FOUR if job.sample]
    assert _good([*launcher.run("sample", 4, 300).merged]) == [sampled]


@pytest.mark.slow
def test_collectives_layouts_files_and_a_rank_that_ends(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = {work: nccl_ranks.FAULTS[work] for work in ("other", "ends")}
    monkeypatch.setattr(nccl_ranks, "FAULTS", faults)
    monkeypatch.setattr(nccl_ranks, "SHORT", 200.0)
    monkeypatch.setattr(nccl_ranks, "LONG", 200.0)
    found = _good([*nccl_ranks.several_ranks(launcher, {"gloo": {}}, [2, 4], 500, "sample")])
    sampled = [f"{job}, {size} ranks" for size in (2, 4) for job in rank_work.JOBS[size] if job.sample]
    assert found == [
        "values travel between ranks",
        "8 collectives of 2 ranks, at once",
        "8 collectives of 2 ranks, started",
        *sampled,
        "NaN in a parameter",
        "a checkpoint of dp, zero 3, read by tp",
        "a batch of other rows on one rank",
        "a rank ends",
    ]


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_named(launcher: Launcher) -> None:
    ended = launcher.run("away", 2, 120, awaited=[0])
    assert ended.codes[0] and ended.codes[1] is None, ended.codes
    assert "QN402" in ended.texts[0] and "rank 1 is at " in ended.texts[0], ended.texts[0][-2000:]


def test_what_does_not_begin_in_time_is_told_of(launcher: Launcher) -> None:
    (left,) = nccl_ranks._checks(launcher, "layouts", 2, 100, 0)
    assert left == NotRun("layouts, 2 ranks", "no time was left")
    (fault,) = nccl_ranks._fault(launcher, "away", 0)
    assert fault == NotRun("a rank does not come", "no time was left")


def test_a_check_holds_where_it_holds_on_all_ranks() -> None:
    both, one, bad = Check("a", True, "1"), Check("b", True, "2"), Check("c", False, "3")
    ended = Ended(1.0, (0, 0), ((both, one, bad), (both, Check("c", True, "4"))), ("", ""))
    assert ended.merged == [both, Check("b", False, "2"), Check("c", False, "3 | 4")]
    (check,) = Ended(1.0, (None, 0), ((), ()), ("it hangs", "")).merged
    assert not check.good and "it hangs" in check.found


def test_older_versions_have_a_rank_for_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(torch.device("cuda", 0), emulated=False)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    assert nccl_ranks.reason_not_to_run(setting) == (
        "NCCL 2.28.9 has one rank for each device; 2.30 and later have more: --library names one"
    )
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 1))
    assert nccl_ranks.reason_not_to_run(setting) == ""
    (left,) = nccl_ranks.run(Setting(torch.device("cpu"), emulated=False))
    assert left == NotRun(nccl_ranks.WHAT, "it takes a CUDA device")


def test_the_version_of_a_library(tmp_path: Path) -> None:
    source, library = tmp_path / "nccl.c", tmp_path / "libnccl.so"
    source.write_text("int ncclGetVersion(int *version) { *version = 23203; return 0; }")
    assert os.system(f"cc -shared -fPIC -o {library} {source}") == 0
    assert nccl_ranks.version_of(library) == (2, 32, 3)
