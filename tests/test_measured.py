"""Measured steps: they are steps, their timelines say who waited for what, and can be kept as files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import quintnet
from quintnet import CompileError, Mesh, RunError
from quintnet_compiler.cli.app import app
from quintnet_compiler.runtime.execute.record import Recorded, RecordedSpan
from quintnet_compiler.simulation.measured import MAX_RANKS, measured_timeline, shown_ranks
from quintnet_compiler.simulation.timeline import Timeline

MODULE = """
import torch, torch.nn as nn, torch.nn.functional as F

def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    return model, (torch.randn(8, 16), torch.randint(0, 8, (8,))), F.cross_entropy
"""


def _compiled(**axes: int) -> tuple[quintnet.CompiledProgram, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    batch = torch.randn(8, 16), torch.randint(0, 8, (8,))
    return quintnet.compile(model, Mesh(**axes), batch, loss_fn=F.cross_entropy, microbatches=2), batch


def _measured_as_a_step(axes: dict[str, int]) -> Timeline:
    program, batch = _compiled(**axes)
    loss = program.step(batch)
    expected = [p.grad.to_local().clone() for p in program.parameters()]  # type: ignore[union-attr]
    program.zero_grad()
    again, timeline = program.measure(batch)
    found = [p.grad.to_local().clone() for p in program.parameters()]  # type: ignore[union-attr]
    assert torch.equal(loss, again) and all(map(torch.equal, found, expected)) and found
    program.zero_grad()
    assert torch.equal(program.step(batch), loss)  # and afterwards steps are as before
    return timeline


def _kinds(timeline: Timeline, rank: int) -> list[str]:
    return [f"{e.kind}{e.microbatch}" for e in timeline.rank(rank).events if e.microbatch >= 0]


def test_one_rank() -> None:
    timeline = _measured_as_a_step({})
    assert _kinds(timeline, 0) == ["F0", "B0", "F1", "B1"]
    row = timeline.rank(0)
    assert 0 < row.busy_seconds < timeline.seconds and not row.exposed and "measured on cpu" in timeline.notes[0]


@pytest.mark.slow
def test_ranks_of_processes(tmp_path: Path) -> None:
    found = quintnet.launch(_measured_as_a_step, 4, ({"pp": 2, "dp": 2},))
    timeline = found[0]
    assert all(one == timeline for one in found) and [row.rank for row in timeline.rows] == [0, 1, 2, 3]
    assert _kinds(timeline, 0) == ["F0", "F1", "B0", "B1"] and _kinds(timeline, 3) == ["F0", "B0", "F1", "B1"]
    for row in timeline.rows:
        assert {event.kind for event in row.events} >= {"F", "B", "transfer", "sum", "meeting"}
        assert {"pp", "dp", "all"} == set(row.exposed) and 0 <= row.bubble < 1
        assert all(0 <= event.start <= event.end <= timeline.seconds for event in row.events)
    first = {event.microbatch: event for event in timeline.rank(0).events if event.kind == "F"}
    last = {event.microbatch: event for event in timeline.rank(2).events if event.kind == "F"}
    assert first[0].end < last[0].end and first[1].end < last[1].end

    timeline.save(tmp_path / "step.json")
    assert Timeline.load(tmp_path / "step.json") == timeline
    program, _ = _compiled(pp=2, dp=2)
    page = program.dump(tmp_path / "out", measured=timeline) / "index.html"
    text = page.read_text(encoding="utf-8")
    assert "Both have one scale" in text and text.index("predicted:") < text.index("measured:")
    with pytest.raises(CompileError, match=r"QN211 .*\n.*4 ranks, 1f1b, 2 microbatches, the program of 1 ranks"):
        _compiled()[0].dump(tmp_path / "other", measured=timeline)


def test_ranks_that_take_turns_are_not_measured() -> None:
    program, batch = _compiled(dp=2)
    with pytest.raises(RunError, match=r"QN301.*\n.*take turns") as error:
        program.measure(batch)
    assert "quintnet.launch" in error.value.fix


def test_waiting_for_a_stage_is_idle_until_it_sends() -> None:
    """Rank 1 waits from 1 to 5; rank 0 sends at 4: three seconds of bubble, one of the link. Both then meet."""
    program = _compiled(pp=2)[0]._primary().program
    meeting = RecordedSpan(8.0, 10.0, "meeting", "loss", axis="all", exposed=2.0)
    one = Recorded(
        0, 10.0,
        (
            RecordedSpan(0.0, 4.0, "F", "0F0", 0, 0),
            RecordedSpan(1.0, 2.0, "collective", "g", 0, axis="tp", exposed=1.0),
            RecordedSpan(4.0, 4.5, "send", "x", axis="pp", exposed=0.0, message=(1, 0, 1)),
            RecordedSpan(4.0, 8.0, "B", "0B0", 0, 0),
            meeting,
        ),
    )  # fmt: skip
    receive = RecordedSpan(0.5, 5.0, "receive", "x", axis="pp", exposed=4.0, message=(0, 0, 1))
    two = Recorded(1, 10.0, (receive, RecordedSpan(5.0, 8.0, "F", "1F0", 1, 0), meeting))
    texts = [two.to_json(), one.to_json()]
    assert Recorded.from_json(texts[0]) == two
    timeline = measured_timeline(program, texts, torch.device("cpu"))
    first, second = timeline.rows
    assert first.exposed == {"tp": 1.0, "all": 2.0} and first.busy_seconds == 8.0 and first.bubble == 0.0
    assert second.exposed == {"pp": 1.0, "all": 2.0} and second.busy_seconds == 3.0
    assert second.bubble == pytest.approx(0.4)  # 3 seconds until the send, and one before it asked
    assert [(e.start, e.end) for e in second.events if e.kind == "transfer"] == [(4.0, 5.0)]


def test_processes_of_a_machine_have_one_clock() -> None:
    """Rank 1 left the barrier 2 seconds after rank 0; of rank 2's machine nothing is known but its own start."""
    program = _compiled(pp=2)[0]._primary().program
    spans = (RecordedSpan(0.0, 1.0, "F", "0F0", 0, 0),)
    found = [Recorded(0, 4.0, spans, "a", 10.0), Recorded(1, 3.0, spans, "a", 12.0), Recorded(2, 3.0, spans, "b", 77.0)]
    timeline = measured_timeline(replace(program, mesh=Mesh(pp=3)), [r.to_json() for r in found], torch.device("cpu"))
    assert [row.events[0].start for row in timeline.rows] == [0.0, 2.0, 0.0] and timeline.seconds == 5.0
    assert "first rank of each" in timeline.notes[1]


def test_of_many_ranks_whole_pipelines_are_shown() -> None:
    mesh = Mesh(pp=4, dp=32)
    shown = shown_ranks(mesh)
    assert len(shown) == MAX_RANKS and {mesh.coordinate(rank)["dp"] for rank in shown} == set(range(16))
    assert shown_ranks(Mesh(pp=128)) == frozenset(range(128))


def test_what_is_no_timeline_is_refused(tmp_path: Path) -> None:
    program, _ = _compiled(pp=2)
    predicted = program.simulate()
    good = json.loads(predicted.to_json())
    path = tmp_path / "step.json"
    predicted.save(path)
    assert Timeline.load(path) == predicted
    event = good["rows"][0]["events"][0]
    broken: list[dict[str, Any]] = [
        {**good, "seconds": "1"},
        {**good, "seconds": 0.0},
        {**good, "rows": []},
        {**good, "more": 1},
        {**good, "rows": [{**good["rows"][0], "events": [{**event, "end": float("nan")}]}]},
        {**good, "rows": [{**good["rows"][0], "events": [{**event, "end": good["seconds"] * 2}]}]},
        {**good, "rows": [{**good["rows"][0], "count": "all"}]},
    ]
    for text in ("", "[]", '{"seconds": 1}', *map(json.dumps, broken)):
        path.write_text(text)
        with pytest.raises(CompileError, match=r"QN211.*\n.*step.json is no timeline"):
            Timeline.load(path)
    with pytest.raises(CompileError, match="QN211"):
        Timeline.load(tmp_path / "missing.json")
    with pytest.raises(CompileError, match="QN211"):
        replace(predicted, schedule="gpipe").require_schedule(2, program.schedule)


def test_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "measured_target.py").write_text(MODULE)

    def run(*args: str) -> str:
        done = CliRunner().invoke(app, list(args))
        assert done.exit_code == 0, done.output
        return done.stdout

    found = json.loads(run("measure", "measured_target:build", "--mesh", "dp=1", "--out", "step.json", "--json"))
    assert found["ranks"] == 1 and found == json.loads((tmp_path / "step.json").read_text())
    run("dump", "measured_target:build", "--mesh", "dp=1", "--out", "out", "--measured", "step.json")
    assert (tmp_path / "out/timeline/measured.svg").is_file()
    assert CliRunner().invoke(app, ["measure", "measured_target:build"]).exit_code == 2
