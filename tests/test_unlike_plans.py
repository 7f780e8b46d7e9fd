"""Plans for clusters of several kinds of nodes, from a real model to its gradients."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import Cluster, CompileError, Mesh
from quintnet_compiler.cost_models.hardware import HARDWARE
from quintnet_compiler.planner.asking import Questions
from quintnet_compiler.planner.bounds import LayoutBounds
from quintnet_compiler.planner.layouts import layouts
from quintnet_compiler.planner.places import Slowdown

WIDTH, DEPTH, ROWS = 512, 8, 4096
PINNED = {"microbatches": 8, "schedule": "1f1b", "recompute": "none", "zero": 0, "virtual_stages": 1}
SLOW_AND_FAST = Cluster.of(Cluster("a100", 1, 1), Cluster("h100", 1, 1))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def _model(width: int = WIDTH) -> nn.Module:
    return nn.Sequential(*(Block(width) for _ in range(DEPTH)))


def _large() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    with torch.device("meta"):
        x = torch.randn(ROWS, WIDTH)
        return _model(), (x, x)


def _estimate(cluster: Cluster, **plan: object) -> quintnet.Estimate:
    model, batch = _large()
    return quintnet.estimate(model, cluster, batch, {**PINNED, **plan}, loss_fn=F.mse_loss)


@pytest.fixture(scope="module")
def report() -> quintnet.PlanReport:
    model, batch = _large()
    return quintnet.plan(model, SLOW_AND_FAST, batch, loss_fn=F.mse_loss, plan=PINNED, top_k=3)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param({"mesh": {"dp": 2}}, id="dp", marks=pytest.mark.slow),
        pytest.param({"mesh": {"tp": 2}}, id="tp", marks=pytest.mark.slow),
        pytest.param({"mesh": {"pp": 2}, "stages": ["3"]}, id="pp"),
        pytest.param({"mesh": {"dp": 2}, "zero": 3}, id="zero"),
    ],
)
def test_two_kinds_of_equal_speed_cost_what_one_kind_does(plan: dict[str, object]) -> None:
    twin = replace(HARDWARE["h100"], name="twin of H100")
    one = _estimate(Cluster("h100", 2, 1), **plan)
    two = _estimate(Cluster.of(Cluster("h100", 1, 1), Cluster(twin, 1, 1)), **plan)
    assert two.seconds == one.seconds and two.memory == one.memory
    assert two.communication == one.communication and two.figures == one.figures


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"tp": 2}], ids=["dp", "tp"])
def test_ranks_of_both_kinds_wait_for_the_slower(mesh: dict[str, int]) -> None:
    both, slow, fast = (
        _estimate(one, mesh=mesh) for one in (SLOW_AND_FAST, Cluster("a100", 2, 1), Cluster("h100", 2, 1))
    )
    assert both.seconds == pytest.approx(slow.seconds, rel=1e-3) and both.seconds > 1.3 * fast.seconds
    text = str(both)
    assert "place 0 on 1 x A100-SXM-80GB + 1 x H100-SXM-80GB" in text and "each waits for the slowest" in text
    (where,) = both.places
    assert dict(where.alone)["A100-SXM-80GB"] == pytest.approx(1) and dict(where.alone)["H100-SXM-80GB"] < 0.8


@pytest.mark.slow
def test_the_plan_has_stages_as_uneven_as_its_devices(report: quintnet.PlanReport) -> None:
    best = report.found.ranked[0]
    assert best.layout.pp == 2
    slow, fast = best.places
    assert (slow.devices, fast.devices) == ("1 x A100-SXM-80GB", "1 x H100-SXM-80GB")
    assert slow.units < fast.units and slow.units + fast.units >= DEPTH
    assert isinstance(report.ask, Questions)
    every = [report.ask.pricing(best.layout, (str(block),)).seconds for block in range(1, DEPTH)]
    assert best.seconds == min(every) < 0.95 * every[DEPTH // 2 - 1]
    other = _estimate(Cluster.of(Cluster("h100", 1, 1), Cluster("a100", 1, 1)), mesh={"pp": 2})
    assert other.places[0].units > other.places[1].units  # in the other order, the other way round


def test_no_layout_costs_less_than_its_bounds() -> None:
    """Of all that the planner searches, on a fast device and a small one."""
    small = replace(HARDWARE["a100"], name="small", memory_bytes=2e8)
    model, batch = _large()
    cluster = Cluster.of(Cluster("h100", 1, 1), Cluster(small, 1, 1))
    pinned = {"microbatches": 8, "schedule": "1f1b", "recompute": "none"}
    found = quintnet.plan(model, cluster, batch, loss_fn=F.mse_loss, plan=pinned, work=math.inf, seconds=300)
    assert isinstance(found.ask, Questions) and found.found.ended == "proof"
    planner, pricing = found.ask.planner, found.ask.pricing
    slower = Slowdown(pricing.build, cluster, planner.machine.fastest)
    assert slower(found.found.ranked[0].layout, 1) > slower(found.found.ranked[0].layout, 2) > 1.2
    routed, rows = 0, planner.workload.rows
    bounds = LayoutBounds(
        slower.fastest_units, planner.machine.fastest, planner.parameter_bytes(), routed, rows, slower
    )
    best, most = math.inf, 0.92 * planner.machine.memory_bytes
    everything = list(layouts(planner.limits()))
    bounds.narrow(everything)
    for layout in everything:
        one = pricing(layout)
        for step in range(bounds.steps):
            assert max(bounds.seconds(layout), bounds.closer_seconds(layout, step)) <= one.seconds
            assert max(bounds.bytes(layout), bounds.closer_bytes(layout, step)) <= one.claimed_bytes
        best = min(best, one.seconds if one.claimed_bytes <= most else math.inf)
    assert found.found.ranked[0].seconds == best


def test_the_report_has_the_numbers_of_the_pipeline_and_of_data_parallelism(report: quintnet.PlanReport) -> None:
    text = str(report)
    assert text.startswith("1 x A100-SXM-80GB + 1 x H100-SXM-80GB")
    assert "place 0 on 1 x A100-SXM-80GB" in text and "place 1 on 1 x H100-SXM-80GB" in text
    assert "with stages on several kinds, which wait for the slowest: " in text
    assert "; each waits for the slowest; H100-SXM-80GB would take " in text
    waiting = min((one for one in report.ask.known() if one.mixed), key=lambda one: one.seconds)
    assert waiting.seconds > report.found.ranked[0].seconds
    first = json.loads(report.to_json())["plans"][0]
    assert [one["devices"] for one in first["places"]] == ["1 x A100-SXM-80GB", "1 x H100-SXM-80GB"]
    peak = sum(HARDWARE[kind].flops_per_second("fp32") for kind in ("a100", "h100"))
    assert first["model_flop_utilisation"] == pytest.approx(first["model_flops"] / first["step_seconds"] / peak)
    with pytest.raises(CompileError, match="QN216"):
        report.scaling([1])


def test_the_uneven_plan_computes_what_the_module_does(report: quintnet.PlanReport) -> None:
    """All ranks in this process, float64."""
    torch.manual_seed(0)
    model = _model(16).double()
    twin, x, y = copy.deepcopy(model), *(torch.randn(16, 16, dtype=torch.float64) for _ in range(2))
    plan = report.best
    program = quintnet.compile(model, Mesh(**plan.mesh), (x, y), loss_fn=F.mse_loss, plan=plan, device="cpu")
    loss = F.mse_loss(twin(x), y)
    loss.backward()
    assert abs(float(program.step((x, y))) - float(loss.detach())) < 1e-14
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        found = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        assert torch.allclose(found, q.grad, rtol=0, atol=1e-14), name
    held = [stage.state for stage in program._primary().program.stages]
    assert len(held[0]) < len(held[1])  # the slower device has fewer blocks
    assert program.plan.stages == report.found.ranked[0].begins


def test_a_simulation_prices_each_stage_where_it_lies(report: quintnet.PlanReport) -> None:
    model, batch = _large()
    mesh, plan = Mesh(**report.best.mesh), report.best
    program = quintnet.compile(model, mesh, batch, loss_fn=F.mse_loss, plan=plan, device="cuda", check="off")
    both, slow, fast = (program.simulate(one) for one in (SLOW_AND_FAST, Cluster("a100", 2, 1), Cluster("h100", 2, 1)))
    busy = [[row.busy_seconds for row in one.rows] for one in (both, slow, fast)]
    assert busy[0] == pytest.approx([busy[1][0], busy[2][1]], rel=1e-12)
    assert both.seconds == pytest.approx(report.found.ranked[0].pipeline, rel=0.02)
    assert any("as long as on the slowest of its devices" in note for note in both.notes)


def test_axes_in_an_unusual_order_are_refused() -> None:
    four = Cluster.of(Cluster("a100", 1, 2), Cluster("h100", 1, 2))
    with pytest.raises(CompileError, match=r"(?s)QN201.*pp outermost"):
        _estimate(four, mesh={"tp": 2, "pp": 2})
