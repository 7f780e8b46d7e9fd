"""dump, simulation, reports and textbook, part by part: folded text, pictures, files, a timeline by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from quintnet_compiler.api.compiled_program import CompiledProgram
from quintnet_compiler.api.program_reports import ProgramReports
from quintnet_compiler.api.visualize import visualize
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.core.mesh import Mesh
from quintnet_compiler.dump.code_view import stages_code
from quintnet_compiler.dump.communication import exchanges, moved_bytes, schedule_document, transfer_bytes
from quintnet_compiler.dump.compare import compare_folders, compare_plans
from quintnet_compiler.dump.drawing import boxes, dot, draw_boxes, edges
from quintnet_compiler.dump.fold import fold
from quintnet_compiler.dump.folder import hashes_of, manifest, ranks_files, write_files
from quintnet_compiler.dump.model_graph import operators, units
from quintnet_compiler.dump.page import counted
from quintnet_compiler.dump.pass_view import passes_view
from quintnet_compiler.ir.plan import Plan
from quintnet_compiler.ops.collectives import COLLECTIVES, reduce_scatter, wait
from quintnet_compiler.reports.explain import Explanation
from quintnet_compiler.reports.explain_gradient import prove_gradients
from quintnet_compiler.reports.program_tensors import picture_of, picture_of_state
from quintnet_compiler.reports.tensor_picture import picture_of_types
from quintnet_compiler.schedules.kinds import one_f_one_b
from quintnet_compiler.simulation import chart
from quintnet_compiler.simulation.saved import read_timeline
from quintnet_compiler.simulation.timeline import Event, RankTimeline, Timeline
from quintnet_compiler.textbook.machine import Link, Machine
from quintnet_compiler.textbook.programs import data_parallel, one_device, pipeline, tensor_parallel
from quintnet_compiler.textbook.steps import Collective, Compute, Hold, Receive, Release, Send

from ..golden.programs import golden_passes, golden_program
from .graphs import builder, leaf


@pytest.fixture(scope="module")
def compiled() -> CompiledProgram:
    return golden_program("transformer")


def test_what_a_program_says_of_itself(compiled: CompiledProgram) -> None:
    reports: ProgramReports = compiled
    assert reports.plan.mesh == dict(reports.mesh.axes) and len(reports.ranks) == reports.mesh.size
    assert len(reports.schedule.actions) == reports.mesh["pp"] and reports.model_flops > 0
    assert list(dict(reports.passes())) == [name for name in reports.compile_seconds if name[0].isupper()]
    assert all(value >= 0 for value in reports.compile_seconds.values())
    mine, costs = reports.simulate(), reports.simulate().seconds
    assert mine.seconds == costs > 0 and not reports.diff(compiled).plan


# -- dump


def test_equal_blocks_are_shown_once() -> None:
    items = ["in", "0:a", "0:b", "1:a", "1:b", "2:a", "2:b", "out"]
    found = fold(items, lambda x: ("blocks.", x[0]) if ":" in x else None, lambda x: x.partition(":")[2] or x)
    assert [(unit.title, unit.items, unit.same) for unit in found] == [
        ("", ("in",), ()), ("blocks.0", ("0:a", "0:b"), ("blocks.1", "blocks.2")), ("", ("out",), ()),
    ]  # fmt: skip
    assert found[1].rest == "blocks.1 to blocks.2"


def test_what_each_pass_changed() -> None:
    views = {view.name: view for view in passes_view(golden_passes("transformer"))}
    assert views["LowerPrecision"].unchanged and not views["InsertCommunication"].unchanged
    counts = dict(views["FuseCollectiveMatmuls"].counts)
    assert counts["quintnet.all_gather"] == -counts["quintnet.all_gather_matmul"] < 0


def test_what_ranks_exchange(compiled: CompiledProgram) -> None:
    program = compiled._primary().program
    (transfer,) = program.transfers
    assert transfer_bytes(program, transfer) == (128, 128)  # half of 2 x 4 x 8 float32 rows, split over tp
    found = [one for stage in program.stages for one in exchanges(program, stage.forward)]
    assert {one.axis for one in found} == {"tp"} and all(one.ranks == 2 and one.bytes > 0 for one in found)
    document = schedule_document(program)
    assert document["actions"] == [[str(a) for a in row] for row in program.schedule.actions]


def test_a_collective_that_is_started_exchanges_as_much_as_one_that_is_not() -> None:
    to = builder()
    x = leaf(to, "input", "x", 8, 4)
    whole = to.call(reduce_scatter, x, "tp", 2, 0, 1)
    begun = to.call(COLLECTIVES["reduce_scatter"].start, x, "tp", 2, 0, 1)
    to.call(wait, begun)
    assert moved_bytes(whole) == moved_bytes(begun) == 8 * 4 * 4


def test_code_is_folded_and_equal_stages_are_told_once(compiled: CompiledProgram) -> None:
    program = compiled._primary().program
    first, second = stages_code(program)
    assert first.ranks == "ranks 0, 1" and second.ranks == "ranks 2, 3" and first.like is None
    lines = [line for function in first.functions for unit in function.units for line in unit.items]
    assert any(line.communicates for line in lines) and any("models.py" in line.source for line in lines)
    assert list(ranks_files(program)) == ["ranks/rank000.py", "ranks/rank002.py", "ranks.json"]


def test_a_graph_of_blocks(compiled: CompiledProgram) -> None:
    program = compiled._primary().program
    shown = units(program, operators(program))
    drawn = boxes(shown)
    arrows = edges(drawn, shown)
    assert (0, 1) in arrows and all(a < b for a, b in arrows)
    text = dot(drawn, arrows)
    assert text.startswith("digraph model {") and 'label="stage 1"' in text and text.count("->") == len(arrows)
    assert ElementTree.fromstring(str(draw_boxes(drawn, arrows))).tag.endswith("svg")
    assert counted(1, "rank") == "1 rank" and counted(2, "rank") == "2 ranks"


def test_folders_and_plans_are_compared(tmp_path: Path) -> None:
    for name, line in (("a", "x = 1\n"), ("b", "x = 2\n")):
        files = {"plan.json": Plan(mesh={"tp": 2}).to_json(), "ranks/rank000.py": f"first\n{line}"}
        write_files(tmp_path / name, {**files, "manifest.json": manifest(files)})
    found = compare_folders(tmp_path / "a", tmp_path / "b")
    change = found.files["ranks/rank000.py"]
    assert (change.added, change.removed, change.lines) == (1, 1, ("-x = 1", "+x = 2")) and not found.plan
    assert compare_plans(Plan(zero=1), Plan(zero=2)).plan == {"zero": (1, 2)}
    assert str(compare_plans(Plan(), Plan())) == "no difference"
    assert json.loads(manifest({"a": ""}))["files"] == hashes_of({"a": ""})


# -- reports


def test_who_holds_what() -> None:
    picture = picture_of_types(Mesh(dp=2, tp=2), {"dp": "S(0)", "tp": "S(1)"}, (4, 6))
    parts = {part.ranks: part.ranges for part in picture.parts}
    assert parts[(3,)] == (((2, 4),), ((3, 6),)) and len(parts) == 4
    fused = picture_of_types(Mesh(tp=2), {"tp": "S(0,3)"}, (12,))
    assert fused.parts[1].ranges == (((2, 4), (6, 8), (10, 12)),)
    assert visualize(Mesh(tp=2), {"tp": "S(0,3)"}, (12,)) == fused
    assert ElementTree.fromstring(picture.svg()).tag.endswith("svg")
    with pytest.raises(CompileError, match="QN204"):
        visualize(Mesh(tp=2), "weight")


def test_why_a_gradient_is_right(compiled: CompiledProgram) -> None:
    program = compiled._primary().program
    text = prove_gradients(program, "blocks.0.up.weight")
    assert "blocks.0.up.weight" in text and "tp: S(0)" in text
    assert picture_of_state(program, "blocks.0.up.weight").types["tp"] == "S(0)"
    with pytest.raises(CompileError, match=r"did you mean blocks\.0\.up\.weight"):
        picture_of(program, "blocks.0.up.weights")
    explained = compiled.explain("blocks.0.up")
    assert isinstance(explained, Explanation) and "linear" in explained.text


# -- timelines


def _timeline() -> Timeline:
    events = Event(0.0, 1.0, "F", "F", 0, 0), Event(1.5, 3.5, "B", "B", 0, 0), Event(1.0, 1.5, "sum", "g", -1, -1, "dp")
    row = RankTimeline(0, {"dp": 0}, 2, events, 3.0, 0.25, {"dp": 0.5})
    return Timeline("a step", "1f1b", 1, 2, 4.0, (row,))


def test_seconds_are_pixels() -> None:
    scale = chart.Scale(4.0, left=10, width=100)
    assert (scale.x(0), scale.x(2), scale.x(4)) == (10, 60, 110)
    assert [tick["text"] for tick in scale.ticks()][:2] == ["0 s", "500 ms"] and len(scale.ticks()) == 9
    assert chart.Scale(0.0).ticks() == []


def test_a_timeline_is_drawn_saved_and_read(tmp_path: Path) -> None:
    timeline = _timeline()
    picture = chart.timeline_svg(timeline)
    assert ElementTree.fromstring(picture).tag.endswith("svg") and "rank 0  ×2" in picture
    assert "bubble 25.0%" in picture and "<html" in chart.timeline_page(timeline)
    timeline.save(tmp_path / "step.json")
    assert read_timeline(tmp_path / "step.json") == timeline
    document = json.loads(timeline.to_json())
    for wrong in ({**document, "extra": 1}, {**document, "seconds": "4"}):
        (tmp_path / "wrong.json").write_text(json.dumps(wrong))
        with pytest.raises(CompileError, match="is no timeline"):
            read_timeline(tmp_path / "wrong.json")


def test_lanes_go_from_the_innermost_axis_to_all_ranks() -> None:
    axes = ("all", "dp+tp", "dp", "pp", "tp")
    events = tuple(Event(0.0, 1.0, "sum", "g", -1, -1, axis) for axis in axes)
    timeline = Timeline("a step", "1f1b", 1, 8, 1.0, (RankTimeline(0, {"dp": 0}, 8, events, 1.0, 0.0, {}),))
    lanes = re.findall(r'text-anchor="end">([a-z+]+)<', chart.timeline_svg(timeline))
    assert lanes[:5] == ["tp", "dp", "pp", "dp+tp", "all"]


# -- the textbook


def test_the_way_between_two_devices() -> None:
    machine = Machine(4, link=Link(1.0, 10.0), between=Link(2.0, 5.0), node=2)
    assert machine.joins(0, 1).time(10) == 2.0 and machine.joins(1, 2).time(10) == 4.0
    ring = Machine(8, link=Link(1.0, 10.0), topology="ring")
    assert ring.joins(0, 6).time(10) == 4.0  # two hops, the shorter way
    alone = Machine(4, link=Link(1.0, 10.0))
    assert alone.collective_seconds("all_reduce", 40, (0, 1, 2, 3)) == pytest.approx(6 * 1.0 + 60 / 10)
    assert alone.collective_seconds("all_gather", 40, (0, 1)) == pytest.approx(1.0 + 20 / 10)
    assert alone.collective_seconds("all_reduce", 40, (2,)) == 0
    with pytest.raises(CompileError):
        Machine(0)


def test_programs_of_the_textbook() -> None:
    (program,) = one_device(2, 8.0, 4.0)
    assert [type(step) for step in program] == [Compute, Hold, Compute, Hold, Compute, Release, Compute, Release]
    assert sum(step.flops for step in program if isinstance(step, Compute)) == 3 * 2 * 8
    split = data_parallel(4, 2, 8.0, 100.0)
    assert len(split) == 4 and sum(s.flops for s in split[0] if isinstance(s, Compute)) == 12
    assert all(s.background for s in split[0] if isinstance(s, Collective))
    assert [type(s) for s in data_parallel(2, 2, 8.0, 1.0, overlap=False)[0]][-2:] == [Collective] * 2
    assert sum(isinstance(s, Collective) for s in tensor_parallel(2, 3, 8.0, 1.0)[0]) == 2 * 2 * 3
    first, second = pipeline(one_f_one_b(2, 2), 1.0, 2.0, 5.0)
    assert sum(isinstance(s, Send) for s in first) == sum(isinstance(s, Receive) for s in second) == 2
