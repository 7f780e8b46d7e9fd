"""Numbers of a run from a file that grows, is cut, and goes back; and the page that shows them."""

from __future__ import annotations

import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer

from quintnet_compiler.cli.watch import watch as watch_command
from quintnet_compiler.core.html import figure, page
from quintnet_compiler.reports.line_chart import Line, Span, StepAxis, line_chart
from quintnet_compiler.simulation.timeline import Event, RankTimeline, Timeline
from quintnet_compiler.training.loggers import JsonLogger
from quintnet_compiler.training.run_metrics import MAX_CURVES, MAX_SPANS, Curve, RunMetrics
from quintnet_compiler.training.run_page import RunPage, watch
from quintnet_compiler.training.time_report import RunStart, RunTime, long_time


def _line(step: int, kind: str = "train", **numbers: Any) -> str:
    return json.dumps({"time": 1000.0 + step, "step": step, "kind": kind, **numbers}) + "\n"


def _write(folder: Path, *lines: str) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(lines)


def _loss(found: RunMetrics) -> list[tuple[int, float]]:
    return [(span.first, span.mean) for span in found.curves["train", "loss"].spans]


# -- numbers


def test_what_is_written_while_it_is_read_is_taken_in_once_it_is_whole(tmp_path: Path) -> None:
    found = RunMetrics(tmp_path)
    assert not found.read()  # no file yet
    _write(tmp_path, _line(1, loss=4.0), _line(2, loss=3.0), _line(3, loss=2.0)[:20])
    assert found.read() and _loss(found) == [(1, 4.0), (2, 3.0)] and found.unreadable == 0
    assert not found.read()
    _write(tmp_path, _line(3, loss=2.0)[20:])
    assert found.read() and _loss(found)[-1] == (3, 2.0)
    assert (found.step, found.began, found.until, found.lines) == (3, 1001.0, 1003.0, 3)


def test_what_are_no_lines_of_metrics_are_counted(tmp_path: Path) -> None:
    bad = ["{\n", "[1]\n", '{"step": "1", "kind": "train"}\n', '{"step": -1, "kind": "train"}\n', "\x00\xff\n",
           '{"step": true, "kind": "train"}\n', '{"kind": "train", "loss": 1}\n', "[" * 100_000 + "\n",
           '{"step": 1, "kind": "train", "loss": ' + "9" * 400 + "}\n"]  # fmt: skip
    _write(tmp_path, _line(1, loss=1.0), *bad, "\n", _line(2, loss=2.0))
    found = RunMetrics(tmp_path)
    found.read()
    assert _loss(found) == [(1, 1.0), (2, 2.0)] and found.unreadable == len(bad)


def test_fields_may_be_missing_and_values_may_not_be_finite(tmp_path: Path) -> None:
    _write(tmp_path, _line(1, loss=1.0, lr=0.1), _line(2, lr="nan"), _line(3, loss="nan"), _line(4, loss="inf", lr=0.2))
    _write(tmp_path, _line(4, "validation", loss=3.0, note="text", right=True))
    found = RunMetrics(tmp_path)
    found.read()
    loss, rate = found.curves["train", "loss"].spans, found.curves["train", "lr"].spans
    assert [(s.first, s.finite, s.bad) for s in loss] == [(1, True, 0), (3, False, 1), (4, False, 1)]
    assert [s.first for s in rate] == [1, 2, 4] and math.isinf(found.newest["train", "loss"])
    assert set(found.curves) == {("train", "loss"), ("train", "lr"), ("validation", "loss")}


def test_a_run_that_goes_back_replaces_what_it_does_again(tmp_path: Path) -> None:
    _write(tmp_path, *(_line(step, loss=float(step)) for step in range(1, 8)), _line(4, "validation", loss=0.5))
    _write(tmp_path, _line(4, "resumed"), *(_line(step, loss=-float(step)) for step in range(5, 7)))
    found = RunMetrics(tmp_path)
    found.read()
    assert _loss(found) == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0), (5, -5.0), (6, -6.0)]
    assert found.step == 6 and found.marks == [(4, "resumed at step 4")]
    assert found.curves["validation", "loss"].spans[-1].first == 4  # it was before the checkpoint
    _write(tmp_path, _line(2, loss=9.0))  # without a checkpoint
    found.read()
    assert _loss(found) == [(1, 1.0), (2, 9.0)] and found.marks[-1] == (2, "went back from step 6 to step 2")


def test_another_file_is_read_from_its_beginning(tmp_path: Path) -> None:
    _write(tmp_path, _line(1, loss=1.0), _line(2, loss=2.0))
    found = RunMetrics(tmp_path)
    found.read()
    (tmp_path / "metrics.jsonl").unlink()
    assert not found.read()
    _write(tmp_path, _line(1, loss=7.0), _line(2, loss=8.0), _line(3, loss=9.0))
    assert found.read() and _loss(found) == [(1, 7.0), (2, 8.0), (3, 9.0)] and not found.marks
    (tmp_path / "metrics.jsonl").write_text(_line(1, loss=5.0))  # the same file, shorter
    assert found.read() and _loss(found) == [(1, 5.0)]


def test_a_curve_of_a_million_values_is_bounded_and_keeps_its_extremes() -> None:
    curve, values, random_ = Curve(), [], random.Random(0)
    for step in range(1, 100_001):
        value = -50.0 if step == 77_777 else 99.0 if step == 3 else random_.random()
        values.append(value)
        curve.add(step, value)
    assert MAX_SPANS <= len(curve.spans) <= 2 * MAX_SPANS
    assert min(s.low for s in curve.spans) == -50.0 and max(s.high for s in curve.spans) == 99.0
    for span in curve.spans:
        inside = values[span.first - 1 : span.last]
        assert span.low == min(inside) and span.high == max(inside)
        assert span.mean == pytest.approx(sum(inside) / len(inside))
    assert [s.first for s in curve.spans[1:]] == [s.last + 1 for s in curve.spans[:-1]]  # none is lost
    curve.add(50_000, 1.0)
    assert curve.spans[-1].last == 50_000 and curve.spans[-2].last == 49_999


def test_names_and_lines_without_end_are_bounded(tmp_path: Path) -> None:
    _write(tmp_path, _line(1, **{f"n{i}": 1.0 for i in range(MAX_CURVES + 10)}), "x" * (9 << 20), "\n", _line(2, n0=2))
    found = RunMetrics(tmp_path)
    found.read()
    assert len(found.curves) == MAX_CURVES and found.left_out == 10 and found.step == 2 and found.unreadable >= 1


def test_a_logger_does_not_write_into_a_line_that_was_cut(tmp_path: Path) -> None:
    _write(tmp_path, _line(1, loss=1.0), '{"time": 1, "st')
    logger = JsonLogger(tmp_path)
    logger.open()
    logger.write(2, "train", {"loss": math.nan})
    logger.close()
    logger.open()
    logger.write(3, "train", {"loss": 3.0})
    logger.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 4 and json.loads(lines[2])["step"] == 2 and json.loads(lines[3])["step"] == 3
    found = RunMetrics(tmp_path)
    found.read()
    assert found.unreadable == 1 and found.step == 3


# -- pictures


@pytest.mark.parametrize(
    ("low", "high"), [(0.1, 0.9), (2.0, 2.0), (0.0, 0.0), (-3.5, 4e9), (1e-9, 2e-9), (0.41, 0.4100001), (-5.0, -5.0)]
)
def test_an_axis_has_two_to_seven_ticks_around_its_values(low: float, high: float) -> None:
    axis = StepAxis.of_values(low, high)
    assert 2 <= len(axis.ticks) <= 7 and axis.low <= low <= high <= axis.high
    places = [axis.pixel(x) for x in axis.ticks]
    assert places == sorted(places, reverse=True) and len(set(places)) == len(places)


@pytest.mark.parametrize("last", [1, 2, 3, 7, 11, 19, 101, 999, 12_345, 10**6])
@pytest.mark.parametrize("first", [0, 1, 7, 850])
def test_an_axis_of_steps_has_whole_ticks(first: int, last: int) -> None:
    axis = StepAxis.of_steps(first, first + last - 1)
    assert 2 <= len(axis.ticks) <= 8 and all(x == int(x) and axis.low <= x <= axis.high for x in axis.ticks)


def test_a_line_ends_where_values_are_not_finite() -> None:
    spans = [Span(n, n, float(n), float(n), float(n)) for n in (1, 2, 3)]
    bad = Span(4, 4, math.nan, math.nan, math.nan, 1)
    after = [Span(5, 8, 1.0, 3.0, 2.0), Span(9, 12, 1.0, 5.0, 2.0)]
    picture = line_chart("loss", [Line("train", [*spans, bad, *after, bad]), Line("<b>", spans[:1])], [(2, "<x>")])
    drawn = ElementTree.fromstring(picture)
    paths = [one.get("d", "") for one in drawn.iter("{http://www.w3.org/2000/svg}path")]
    line = next(d for d in paths if d.count("M") == 2 and "Z" not in d)
    assert [piece.count("L") for piece in line.split("M")[1:]] == [2, 1]
    assert sum("Z" in d for d in paths) == 1  # the band of those that stand for several
    assert "2 not finite" in picture and "<b>" not in picture and "<x>" not in picture
    assert line_chart("loss", [Line("train", [bad])]) == "" and line_chart("loss", [Line("train", [])]) == ""


# -- the page


class _Page(HTMLParser):
    """What a page loads, and whether what is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.metas: list[dict[str, str | None]] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert tag not in ("script", "img", "iframe", "object") and "src" not in given
        if tag == "meta":
            self.metas.append(given)
        elif tag == "link":
            assert given["href"] == "data:,"
        else:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def _timeline() -> Timeline:
    row = RankTimeline(0, {"dp": 0}, 2, (Event(0.0, 0.01, "F", "", 0, 0),), 0.01, 0.0, {})
    return Timeline("Mesh(dp=2)", "1f1b", 1, 2, 0.01, (row,))


def _run(folder: Path, end: str = "") -> None:
    _write(
        folder, *(_line(step, loss=1 / step, tokens_per_second=2e5, memory_gib=1.5, lr=1e-3) for step in range(1, 9))
    )
    _write(folder, _line(8, "validation", loss=0.2, accuracy=0.5))
    spent = {"step": 6.0, "compile": 2.0, "data": 2.0}
    RunTime(starts=[RunStart(began=1000.0, until=1010.0, step=8, spent=spent, end=end)]).write(folder)


def test_a_page_of_a_run(tmp_path: Path) -> None:
    _run(tmp_path)
    _timeline().save(tmp_path / "timeline.json")
    shown = RunPage(tmp_path, clock=lambda: 1010.0)
    assert shown.update() and not shown.update()
    text = shown.html(refresh=2)
    assert {"http-equiv": "refresh", "content": "2"} in _Page(text).metas
    for said in ("running", "tokens per second", "200k", "memory in GiB", "learning rate", "accuracy", "60.0%",
                 "A measured step: 10 ms", "validation"):  # fmt: skip
        assert said in text, said
    assert text.count('class="chart"') == 5 and "may have been killed" not in text
    # what is half written, or damaged, leaves what was there
    (tmp_path / "timeline.json").write_text("{")
    (tmp_path / "time.json").write_text("{")
    assert shown.update() and shown.timeline is not None and shown.spent.starts
    assert "A measured step" in shown._repr_html_()


def test_a_page_says_how_a_run_ended_and_what_it_could_not_read(tmp_path: Path) -> None:
    empty = RunPage(tmp_path)
    empty.update()
    assert "no line of metrics.jsonl yet" in empty.html()
    _run(tmp_path)
    _write(tmp_path, "{\n", _line(4, "resumed"), _line(5, loss="nan"))
    late = RunPage(tmp_path, clock=lambda: 1e4)
    late.update()
    text = late.html()
    _Page(text)
    assert "it may have been killed" in text and "1 of 12 lines could not be read" in text
    assert "resumed at step 4" in text and "1 not finite" in text and "refresh" not in text
    _run(tmp_path, "failed")
    late.update()
    assert "failed; the last line" in late.html()


def test_names_in_a_run_are_escaped(tmp_path: Path) -> None:
    evil = "</style><script>alert(1)</script>"
    _write(tmp_path, _line(1, **{evil: 1.0}), _line(2, evil, loss=2.0))
    shown = RunPage(tmp_path)
    shown.update()
    assert "<script" not in shown.html() and "&lt;script&gt;" in shown._repr_html_()


def test_watching_ends_with_the_run(tmp_path: Path) -> None:
    out, looks = tmp_path / "page.html", list[str]()

    def sleep(seconds: float) -> None:
        looks.append(out.read_text())
        if len(looks) == 2:
            _run(tmp_path)
        if len(looks) == 4:
            _run(tmp_path, "finished")

    watch(tmp_path, out, 0.5, sleep=sleep)
    assert "no line" in looks[0] and looks[0] == looks[1] and "running" in looks[2] and looks[2] == looks[3]
    assert len(looks) == 4 and "finished" in out.read_text()
    refreshed = ['http-equiv="refresh"' in text for text in (*looks, out.read_text())]
    assert refreshed == [True] * 4 + [False]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".page")] == []
    assert watch(tmp_path / "none", tmp_path / "other.html", 1.0, once=True).metrics.step is None


@pytest.mark.parametrize("name", ["page.html", ".page.html.part"])
def test_a_page_is_not_written_through_a_link(name: str, tmp_path: Path) -> None:
    """The folder may be somebody else's."""
    kept, run = tmp_path / "kept", tmp_path / "run"
    kept.write_text("kept")
    run.mkdir()
    _run(run)
    (run / name).symlink_to(kept)
    watch_command(run, once=True)
    assert kept.read_text() == "kept" and not (run / "page.html").is_symlink()
    assert (run / "page.html").read_text().startswith("<!doctype html>")


def test_the_verb_writes_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run(tmp_path)
    found = watch_command(tmp_path, once=True)
    assert found.text == str(tmp_path / "page.html") and json.loads(found.document)["step"] == 8
    assert json.loads(found.document)["loss"] == "0.125" and (tmp_path / "page.html").is_file()

    def interrupted(*_: object, **__: object) -> RunPage:
        raise KeyboardInterrupt

    monkeypatch.setattr("quintnet_compiler.training.run_page.watch", interrupted)
    assert json.loads(watch_command(tmp_path, tmp_path / "other.html").document)["page"].endswith("other.html")
    assert 'http-equiv="refresh"' not in (tmp_path / "other.html").read_text()
    with pytest.raises(typer.BadParameter, match="is no folder"):
        watch_command(tmp_path / "none", once=True)


def test_pages_and_figures_are_one_mechanism() -> None:
    given: dict[str, Any] = {"title": "<t>", "cards_shown": [("a", "<b>")], "table": [], "notes": [], "picture": ""}
    whole = page("quintnet_compiler.simulation", "timeline.html.jinja", script="'use strict';", **given)
    assert "<title>&lt;t&gt;</title>" in whole and "&lt;b&gt;" in whole
    digest = re.search(r"script-src 'sha256-([^']+)'", whole)
    assert digest is not None and "<script>'use strict';</script>" in whole
    assert "script-src 'none'" in page("quintnet_compiler.simulation", "timeline.html.jinja", **given)
    part = figure("quintnet_compiler.training", "run.html.jinja", state="", charts=[], shares=[], **given)
    assert part.startswith('<div class="quintnet"><style>.quintnet {') and "<body" not in part
    assert long_time(90) == "90.0 s"
