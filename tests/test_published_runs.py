"""``benchmarks/published_runs.py`` as a script: its JSON has the same fields whatever the rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.published_plans import compare
from benchmarks.published_ranking import Group, Measured, figures, ranks, source_of
from benchmarks.published_rows import Row, Unmodelled, read, run_of, shards_of
from benchmarks.published_runs import DATA, predict, ranked

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
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


def _rows(prefix: str) -> list[Row]:
    return [row for row in read(DATA / "published_runs.csv") if row["id"].startswith(prefix)]


@pytest.mark.parametrize(
    ("notes", "group"),
    [
        ("zero1=8; throughput table", 8),
        ("zero1=-1", 0),  # all
        ("zero1=1", 1),  # InternEvo: none
        ("ZeRO-1 size 16", 0),
        ("ZeRO-1 size: 16", 16),
        ("shard group of 4", 4),
        ("HSDP, sharding groups of 8", 8),
        ("PyTorch FSDP2 group 32; mock data", 32),
        ("Throughput on 128x H100 GPUs (FSDP=64 GBS=256) (FSDP shard group; rest is pure DP)", 64),
        ("FSDP=1 DP=64", 0),
        ("FSDP=0", 0),
        ("FSDP=128", 0),
        ("DeepSpeed ZeRO-3, no model parallelism", 0),
    ],
)
def test_shard_groups_are_read_from_notes(notes: str, group: int) -> None:
    assert shards_of({"notes": notes}, 128) == group


def test_shard_groups_are_read_from_a_column_and_must_divide() -> None:
    assert shards_of({"notes": "zero1=8", "shard_group": "16"}, 128) == 16
    with pytest.raises(Unmodelled, match="12 data ranks in shard groups of 8"):
        shards_of({"notes": "zero1=8"}, 12)


def test_layouts_that_differ_in_the_shard_group_are_no_ties() -> None:
    rows = _rows("IEVO")
    assert {run_of(row).layout.shard for row in rows} == {0, 4, 8}
    groups = ranked(rows, [predict(row) for row in rows])
    assert len(groups) == 11 and all(not group.ties() for group in groups)


def test_releases_of_software_are_not_layouts() -> None:
    """A layout that two releases ran is not ranked, and what was measured twice counts once."""
    rows = [row for row in _rows("DGXC-2") if "Llama_3.1_8B-bf16-H100-8" in row["id"]]
    assert {source_of(row["id"]) for row in rows} == {"DGXC-24.11", "DGXC-25.02"}
    assert not ranked(rows, [predict(row) for row in rows])
    twice = [row for row in _rows("BLOOM") if row["id"] in ("BLOOM-052", "BLOOM-070", "BLOOM-054")]
    (group,) = ranked(twice, [predict(row) for row in twice])
    assert len(group.layouts) == 2 and max(len(one.names) for one in group.layouts) == 2


def test_software_is_no_layout() -> None:
    """Rows that exchange experts' rows in different ways, and rows of Megatron beside DeepSpeed's, are apart."""
    rows = [row for row in _rows("ZOO") if row["id"].endswith(("H100-C", "H100-D"))]
    assert len(rows) == 2 and not ranked(rows, [predict(row) for row in rows])
    rows = [{**row, "notes": row["notes"].replace("A2A dispatcher", "DeepEP")} for row in rows]
    assert len(ranked(rows, [predict(row) for row in rows])) == 1


def test_heads_that_are_not_stated_can_be_divided() -> None:
    """BLOOM-005 has 13,824 elements over 8 tensor ranks: 108 heads of 128 cannot be."""
    (row,) = [row for row in _rows("BLOOM") if row["id"] == "BLOOM-005"]
    assert row["n_heads"] == "" and run_of(row).model.heads == 96


def test_figures_of_ranking() -> None:
    def group(*times: tuple[float, float]) -> Group:
        return Group("A-24.11", False, tuple(Measured((str(n),), *each) for n, each in enumerate(times)))

    liked = group((10.0, 1.0), (8.0, 2.0), (8.1, 3.0))  # measured, predicted
    assert liked.regret == pytest.approx(0.25) and liked.random_regret == pytest.approx(26.1 / 24 - 1)
    assert liked.pairs() == (0.0, 2) and liked.correlation == pytest.approx(-0.5)
    tied = group((10.0, 1.0), (8.0, 1.0), (12.0, 2.0))
    assert tied.regret == pytest.approx(0.125) and tied.pairs() == (2.5, 3) and tied.ties() == (("0", "1"),)
    found = figures([liked, tied])["one node"]
    assert found["groups"] == 2 and found["layouts"] == 6 and found["ties"] == 1
    assert found["regret_mean"] == pytest.approx(0.1875) and found["regret_worst"] == pytest.approx(0.25)
    assert found["pairs_right"] == 0.5 and set(figures([tied])) == {"one node", "source A"}
    assert ranks([3.0, 1.0, 3.0]) == [1.5, 0.0, 1.5]


def test_ranking_of_single_nodes_is_good() -> None:
    """A hundred groups of one source; docs/cost_accuracy.md has the figures of all."""
    rows = read(DATA / "published_runs_single_node.csv")
    found = figures(ranked(rows, [predict(row) for row in rows]))["one node"]
    assert found["groups"] > 100 and found["ties"] == 0
    assert found["correlation"] > 0.9 and found["regret_mean"] < 0.04 < found["regret_random"]


def test_a_published_layout_is_among_those_that_are_searched() -> None:
    (row,) = _rows("KORTH-T5-22B-full")
    found = compare(row, 60.0)
    assert found["complete"] and found["published"] == "tp8 mb4 full" and found["ratio"] <= 1.0
