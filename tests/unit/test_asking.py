"""Further questions to a plan's report: less memory, other numbers of devices, other clusters; and their pictures."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import quintnet
from quintnet_compiler.cli import app
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.planner.asking import MEMORY_SLACK, Question, Questions
from quintnet_compiler.planner.curves import ParetoFront, ScalingCurve, ScalingPoint, Sweep
from quintnet_compiler.planner.estimate import aligned_columns, cells_of
from quintnet_compiler.planner.host_memory import HostMemory
from quintnet_compiler.planner.points_picture import LogAxis, Mark, points_svg
from quintnet_compiler.planner.report import PlanReport
from quintnet_compiler.planner.search import SearchEffort
from quintnet_compiler.planner.workload import with_length

TARGET = "tests.unit.test_asking:mlp"
CLUSTER = quintnet.Cluster("a100", 1, 2)


def mlp() -> tuple[nn.Module, tuple[torch.Tensor, ...], object]:
    """A target of the command line."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    return model, (torch.randn(8, 64), torch.randn(8, 64)), F.mse_loss


@pytest.fixture(scope="module")
def report() -> PlanReport:
    model, batch, loss = mlp()
    return quintnet.plan(model, CLUSTER, batch, loss_fn=loss, price=2.0, tokens=1e6)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_front_trades_time_for_memory(report: PlanReport) -> None:
    front = report.front()
    assert len(front.points) > 2 and front.proven and front.points[0] == report.found.ranked[0]
    for one, two in pairwise(front.points):
        assert one.seconds <= two.seconds and one.memory_bytes > two.memory_bytes
    # nothing that was ranked is better than a point in both
    for one in report.found.ranked:
        assert any(p.seconds <= one.seconds and p.memory_bytes <= 1.26 * one.memory_bytes for p in front.points)
    assert "time against memory" in str(front) and len(str(front).splitlines()) == 2 + len(front.points)
    assert len(json.loads(front.to_json())["front"]) == len(front.points) and "<svg" in front._repr_html_()


@pytest.mark.slow
def test_nothing_goes_to_the_host_where_all_fits_or_where_it_is_decided(report: PlanReport) -> None:
    ask = report.ask
    assert isinstance(ask, Questions)
    assert HostMemory(ask.planner, ask.pricing, report.found, "time", 1e4).better(1) is None
    full = replace(ask.planner, machine=replace(ask.planner.machine, reserve=0.999999))  # what fits now does not then
    gained = HostMemory(full, ask.pricing, report.found, "time", 1e4)
    assert gained.better(1) is None and HostMemory(full, ask.pricing, report.found, "memory", 1e4).better(1) is None
    decided = replace(full, pinned=full.pinned.changed({"offload": ("optimizer",)}, keep_open=True))
    assert HostMemory(decided, ask.pricing, report.found, "time", 1e4).better(1) is None


def test_a_report_pictures_all_that_was_priced(report: PlanReport) -> None:
    fitting = report.ask.known()
    assert report.svg().count("<circle") == len(fitting) > len(report.found.ranked)
    assert report.svg() in report._repr_html_()


@pytest.mark.slow
def test_little_memory_does_not_cost_twice_the_time_for_a_few_percent(report: PlanReport) -> None:
    model, batch, loss = mlp()
    lean = quintnet.plan(model, CLUSTER, batch, loss_fn=loss, objective="memory", top_k=1)  # type: ignore[arg-type]
    least = min(one.memory_bytes for one in report.front().points)
    best = lean.found.ranked[0]
    assert best.memory_bytes <= (1 + MEMORY_SLACK) * least and lean.found.complete
    within = [one for one in report.front().points if one.memory_bytes <= (1 + MEMORY_SLACK) * least]
    assert best.seconds <= min(one.seconds for one in within)
    assert "at most 25% more memory than the least" in str(lean) and "%" not in report.note
    assert lean.front().points[0].seconds == pytest.approx(report.found.ranked[0].seconds)


@pytest.mark.slow
def test_a_scaling_curve_has_the_same_batch_on_other_numbers_of_devices(report: PlanReport) -> None:
    curve = report.scaling((1, 2, 16))
    assert [one.devices for one in curve.points] == [1, 2, 16] and curve.points[1].found == report.found.ranked[0]
    assert curve.points[2].found and curve.points[2].found.layout.mesh.size == 16
    first = curve.points[0].found
    assert first and curve.efficiency[1] == 1
    assert curve.efficiency[2] == pytest.approx(first.seconds / (2 * report.found.ranked[0].seconds))
    assert len(json.loads(curve.to_json())["scaling"]) == 3 and "devices  efficiency" in str(curve)
    with pytest.raises(CompileError, match=r"QN216.*\n.*3 devices are no whole nodes of 2"):
        report.scaling([3])


def test_numbers_of_devices_without_a_layout_say_why() -> None:
    curve = ScalingCurve("H100", (ScalingPoint(8, None, "needs 90 GiB"),))
    assert "8 devices: needs 90 GiB" in str(curve) and "<table>" in curve._repr_html_() and curve.svg() == ""


@pytest.mark.slow
def test_one_argument_is_varied(report: PlanReport) -> None:
    slow = report.sweep("rows", [4, 8])
    seconds = [one.found.seconds for one in slow.points if one.found]
    assert len(seconds) == 2 and seconds[1] == report.found.ranked[0].seconds and seconds == sorted(seconds)
    assert [one.found.workload.rows for one in slow.points if one.found and one.found.workload] == [4, 8]
    assert "rows of the global batch" in str(slow) and slow._repr_html_().count("<circle") == 2
    assert [one["value"] for one in json.loads(slow.to_json())["sweep"]] == [4, 8]
    some = report.sweep("devices", [1, 3])
    assert some.points[0].found and "devices 3: QN216 3 devices are no" in str(some)
    assert "devices" in Sweep("devices", some.points[1:])._repr_html_()
    assert "a batch without tokens has no length" in report.sweep("length", [8]).points[0].why
    for argument, amount in (("speed", 1.0), ("rows", 0.5), ("rows", 0), ("network", math.nan), ("rows", True)):
        with pytest.raises(CompileError, match="QN216"):
            report.sweep(argument, [amount])


@pytest.mark.slow
def test_networks_and_lengths_are_varied() -> None:
    model = nn.Sequential(nn.Embedding(16, 64), nn.Linear(64, 64))
    batch = {"x": torch.zeros(8, 32, dtype=torch.long), "mask": torch.ones(8, 32), "rows": torch.ones(8, 3)}
    longer = with_length(batch, 64)
    assert {name: tuple(x.shape) for name, x in longer.items()} == {"x": (8, 64), "mask": (8, 64), "rows": (8, 3)}

    def loss(found: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return found.square().mean()

    tokens = torch.zeros(8, 32, dtype=torch.long)
    cluster = quintnet.Cluster("a100", nodes=2, gpus_per_node=1)
    report = quintnet.plan(model, cluster, (tokens, tokens), loss_fn=loss, plan={"mesh": {"dp": 2}})
    lengths = [one.found for one in report.sweep("length", [32, 128]).points]
    assert lengths[0] == report.found.ranked[0] and lengths[1] and lengths[1].workload
    assert lengths[1].workload.tokens == 8 * 128 and lengths[1].memory_bytes > lengths[0].memory_bytes  # type: ignore[union-attr]
    slow, fast = (one.found for one in report.sweep("network", [1e6, 1e11]).points)
    assert slow and fast and slow.seconds > fast.seconds


def test_a_simpler_plan_that_is_nearly_as_fast_is_said(report: PlanReport) -> None:
    plain = report.found.ranked[0].layout
    assert report.simpler is None or report.simpler[0].layout.complexity < plain.complexity
    one = replace(plain, tp=1, pp=1, dp=8, zero=3, recompute="none", schedule="1f1b")
    many = replace(one, dp=2, pp=2, cp=2, schedule="zb-h1", zero=1)
    assert (one.complexity, many.complexity) == (1, 5)
    best = replace(report.found.ranked[0], layout=many)
    near = replace(best, layout=one, optimizer=best.optimizer + 0.02 * best.seconds)
    there = replace(
        report, found=replace(report.found, ranked=(best,)), plans=report.plans[:1], simpler=(near, report.best)
    )
    assert "simpler, and nearly as fast: dp=8" in str(there) and "(2.0% slower, with" in str(there)
    assert there.numbers()["simpler"]["layout"] == str(one)


@pytest.mark.slow
def test_two_clusters_side_by_side(report: PlanReport) -> None:
    versus = report.beside(quintnet.Cluster("h100-pcie", 1, 2), price=3.0)
    assert versus.names == ("2 x A100-SXM-80GB", "2 x H100-PCIe-80GB") and versus.other
    rows = {name: (one, two) for name, one, two in versus.figures()}
    assert rows["cost of training"][1] == pytest.approx(3.0 * 2 * versus.other.figures.train_seconds / 3600)  # type: ignore[operator]
    assert versus.other.workload and versus.other.workload.device.name == "H100-PCIe-80GB"
    assert "cost of a million rows" in str(versus) and str(versus).startswith("2 x A100-SXM-80GB:")
    assert json.loads(versus.to_json())["names"] == list(versus.names)
    model, batch, loss = mlp()
    there = quintnet.plan(model, quintnet.Cluster("h100-pcie", 1, 2), batch, loss_fn=loss, top_k=1)  # type: ignore[arg-type]
    assert versus.other.seconds == there.found.ranked[0].seconds


def test_what_a_plan_pins_may_have_no_layout_elsewhere() -> None:
    model, batch, loss = mlp()
    report = quintnet.plan(model, CLUSTER, batch, loss_fn=loss, plan={"mesh": {"tp": 2}}, top_k=1)  # type: ignore[arg-type]
    assert "1 devices: no such layout" in str(report.scaling([1, 2]))
    assert report.beside(quintnet.Cluster("h100", 1, 1)).refused == "no such layout"
    assert report.why_not(mesh={"tp": 8}).refused == "no such layout"
    with pytest.raises(CompileError, match=r"QN201.*\n.*a str is not a cluster"):
        report.beside("h100")  # type: ignore[arg-type]
    with pytest.raises(CompileError, match="QN216"):
        report.beside(CLUSTER, price=-1)


@pytest.mark.slow
def test_a_reserve_of_memory_is_kept_and_said(report: PlanReport) -> None:
    assert "memory may be 73.6 GiB of 80.0 GiB: 8% stays free" in str(report)
    assert json.loads(report.to_json())["reserve"] == 0.08
    model, batch, loss = mlp()
    share = 1 - report.found.ranked[0].memory_bytes / CLUSTER.device.memory_bytes
    tight = quintnet.plan(model, CLUSTER, batch, loss_fn=loss, reserve=share + 1e-6, top_k=1)  # type: ignore[arg-type]
    assert tight.found.ranked[0].memory_bytes < report.found.ranked[0].memory_bytes
    with pytest.raises(CompileError, match=r"QN216.*\n.*reserve=1"):
        quintnet.plan(model, CLUSTER, batch, loss_fn=loss, reserve=1.0)  # type: ignore[arg-type]


def test_questions_take_half_the_effort_each() -> None:
    assert Question("time", SearchEffort(100, 10)).shorter == SearchEffort(50, 5)
    assert Questions.__dataclass_fields__["pricing"].repr is False


def test_parts_of_clusters_keep_what_they_are() -> None:
    cluster = quintnet.Cluster("h100", 4, network_bytes_per_second=1e11, rail=2, oversubscription=3.0)
    assert (cluster.sized(16).nodes, cluster.sized(2).gpus_per_node, cluster.sized(32)) == (2, 2, cluster)
    assert cluster.sized(64).levels == quintnet.Cluster(cluster.device, 8, 8, rail=2, oversubscription=3.0).levels
    assert cluster.has_part(4) and not cluster.has_part(12) and not cluster.has_part(0.5)


# -- pictures


def test_a_picture_has_a_point_for_each_mark() -> None:
    marks = [Mark(1, 100, "<one>"), Mark(10, 50, "two"), Mark(100, 2, "three")]
    root = ET.fromstring(points_svg(marks, "x", "y", proportional=True))
    name = "{http://www.w3.org/2000/svg}"
    circles = root.findall(f"{name}circle")
    places = [(float(one.attrib["cx"]), float(one.attrib["cy"])) for one in circles]
    assert places == sorted(places) and sorted(high for _, high in places) == [high for _, high in places]
    titles = [one.find(f"{name}title") for one in circles]
    assert [one.text for one in titles if one is not None] == ["<one>", "two", "three"]
    assert points_svg([], "x", "y") == ""


def test_axes_are_logarithmic_with_round_ticks() -> None:
    axis = LogAxis.spanning([1, 1000], 0, 300)
    assert axis.position((1 / 1.15 * 1000 * 1.15) ** 0.5) == 150
    assert [text for _, text in axis.ticks] == ["1", "10", "100", "1,000"]
    near = LogAxis.spanning([0.385, 0.445], 0, 100)  # of which 0.4 is the only round one
    assert [text for _, text in near.ticks] == ["0.35", "0.4", "0.45", "0.5"]
    assert len(LogAxis.spanning([3, 4], 0, 100).ticks) >= 3 and len(LogAxis.spanning([5, 5], 0, 100).ticks) >= 3


def test_tables_of_estimates(report: PlanReport) -> None:
    rows = cells_of(report.found.ranked)
    assert rows[0] == ("step", "memory", "bubble", "exposed", "rows/s/device", "MFU", "per million", "layout")
    plain = cells_of([replace(report.found.ranked[0], workload=None)])
    assert plain[0] == ("step", "memory", "bubble", "exposed", "layout") and len(plain) == 2
    lines = aligned_columns([("a", "bb", "c"), ("aaa", "b", "ccc")])
    assert lines == ["  a  bb  c", "aaa   b  ccc"]
    front = ParetoFront(report.found.ranked[:1], 80e9, proven=False)
    assert "not proven" in str(front) and front.svg().count("<circle") == 1


# -- the command line


@pytest.mark.slow
def test_plan_answers_further_questions() -> None:
    given = ["plan", TARGET, "--gpu", "a100", "--gpus-per-node", "2", "--top", "1", "--price", "2"]
    said = CliRunner().invoke(app, [*given, "--front", "--beside", "l4:1:0.5", "--json"])
    assert said.exit_code == 0, said.stderr
    found = json.loads(said.stdout)
    assert found["plans"] and found["front"]["front"] and found["beside"]["names"][1] == "8 x L4-24GB"
    assert found["beside"]["other"]["cost_per_million_rows"] > 0 and "scaling" not in found
    for wrong in ("l4:x", "l4:1:2:3"):
        assert CliRunner().invoke(app, [*given, "--beside", wrong]).exit_code == 2
    assert CliRunner().invoke(app, [*given, "--beside", "l5"]).exit_code == 4
