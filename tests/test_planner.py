"""The planner: its optimum against enumeration, folding against the whole model, and plans that compile."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from typer.testing import CliRunner

import quintnet
from quintnet_compiler.capture.capture import capture
from quintnet_compiler.cli import app
from quintnet_compiler.core.annotations import Facts, annotate
from quintnet_compiler.cost_models.operators import attention_flops
from quintnet_compiler.cost_models.roofline import Roofline
from quintnet_compiler.ir.plan import Plan
from quintnet_compiler.ir.program import Axis
from quintnet_compiler.ir.repeated_blocks import block_members
from quintnet_compiler.ops.rules.table import RULES
from quintnet_compiler.passes.frontend.normalize import Normalize
from quintnet_compiler.passes.sharding.axis_view import ShardingOptions
from quintnet_compiler.passes.sharding.choose_sharding import ChooseSharding
from quintnet_compiler.passes.sharding.fold_blocks import FoldBlocks, Folded
from quintnet_compiler.passes.stages.partition import balanced_starts
from quintnet_compiler.planner.evaluate import evaluate
from quintnet_compiler.planner.layouts import layouts, slicings
from quintnet_compiler.planner.places import PricedCluster
from quintnet_compiler.planner.planning import Planner, faster
from quintnet_compiler.planner.search import SearchEffort
from quintnet_compiler.strategies.rule_book import RuleBook

from .models import CASES, GPT, build

pytestmark = pytest.mark.usefixtures("shared_captures")

torch.set_num_threads(1)
ROWS = 4


class Chain(nn.Module):
    """Blocks of two kinds that alternate, with one weight used at both ends."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(width, width))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width if i % 2 else width), nn.GELU(), nn.LazyLinear(width))
            for i in range(depth)
        )
        self(torch.randn(2, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.table
        for block in self.blocks:
            x = x + block(x)
        return (x @ self.table.t()).square().mean()


def _chain(depth: int = 8, width: int = 64) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return Chain(depth, width), (torch.randn(ROWS, width),)


def _gpt(depth: int, width: int) -> tuple[nn.Module, Any]:
    return GPT(width=width, depth=depth, heads=4), CASES["gpt"].batch(ROWS)


MODELS = {
    "gpt": lambda: _gpt(4, 64),
    "wide gpt": lambda: _gpt(3, 256),
    "chain": _chain,
    "mixture": lambda: (build("mixture"), CASES["mixture"].batch(ROWS)),
    "vit": lambda: (build("vit"), CASES["vit"].batch(ROWS)),
}
CLUSTERS = {
    "2 of a node": quintnet.Cluster("h100", nodes=1, gpus_per_node=2),
    "two nodes of 2": quintnet.Cluster("a100-80", nodes=2, gpus_per_node=2),
}


@functools.cache
def _planner(model: str, cluster: str) -> Planner:
    module, batch = MODELS[model]()
    loss = CASES[model].loss_fn if model in CASES else None
    return Planner.from_captured(capture(module, batch, loss), ROWS, PricedCluster(CLUSTERS[cluster]), Plan(), RULES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "cluster"),
    [
        pytest.param(model, cluster, marks=[pytest.mark.slow] if (i + j) % 2 else [])
        for (i, model), (j, cluster) in itertools.product(enumerate(MODELS), enumerate(CLUSTERS))
    ],
)
def test_the_plan_is_the_best_of_all_layouts(model: str, cluster: str) -> None:
    planner = _planner(model, cluster)
    found = planner.search(3, "time", SearchEffort(math.inf, 600.0))
    builder, limits = planner.builder(), planner.limits()
    everything = []
    for layout in layouts(limits):
        if any(True for _ in faster(layout, limits)):
            continue  # all of them fit
        try:
            ways = [evaluate(planner.machine.places(builder, one), one) for one in slicings(layout, limits)]
        except quintnet.CompileError:
            continue
        everything.append(min(ways, key=lambda e: e.seconds))
    best = sorted(everything, key=lambda e: (e.seconds, e.layout))[:3]
    assert found.complete and len(everything) > 8
    assert max(one.memory_bytes for one in everything) < planner.machine.memory_bytes / 2
    assert [one.seconds for one in found.ranked] == [one.seconds for one in best]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "cluster"),
    [
        ("gpt", "2 of a node"),
        *(pytest.param(model, "two nodes of 2", marks=pytest.mark.slow) for model in MODELS),
    ],
)
def test_no_layout_costs_less_than_its_bounds(model: str, cluster: str) -> None:
    """Of all that the planner searches, for bounds by as many rows as any layout has, and by all rows."""
    planner = _planner(model, cluster)
    pricing, everything = planner.pricing(), list(layouts(planner.limits()))
    for narrowed in (True, False):
        bounds = planner.bounds(pricing.build, planner.limits(), math.inf)
        if narrowed:
            bounds.narrow(everything)
        tight = 0
        for layout in everything:
            try:
                ways = [pricing(one) for one in slicings(layout, planner.limits())]
            except quintnet.CompileError:
                continue
            seconds, size = min(one.seconds for one in ways), min(one.memory_bytes for one in ways)
            steps = range(bounds.steps)
            assert max(bounds.seconds(layout), *(bounds.closer_seconds(layout, step) for step in steps)) <= seconds
            assert max(bounds.bytes(layout), *(bounds.closer_bytes(layout, step) for step in steps)) <= size
            tight += bounds.closer_seconds(layout, steps[-1]) > 0.5 * seconds
        assert tight > len(everything) / 4


@pytest.mark.slow
def test_what_layouts_have_in_common_changes_no_price() -> None:
    """Choices on outer axes, and functions that were run on fake tensors, are known from layouts before."""
    planner = _planner("gpt", "two nodes of 2")
    some = sorted({layout.inside for layout in layouts(planner.limits())})[::5]
    shared = planner.builder()
    together = [shared(one) for one in some]
    assert len(some) > 4 and len(shared.solved) < sum(len(one.mesh.axes) + (one.microbatches > 1) for one in some)
    for one, units in zip(some, together, strict=True):
        planner.folded.program.mode.results.clear()
        assert planner.builder()(one) == units


@pytest.mark.slow
def test_slices_that_cannot_fit_are_not_priced() -> None:
    """Each takes a compilation: two slices with two copies of all state are half of it, which is too much."""
    pinned = Plan(mesh={"tp": 1, "cp": 1, "pp": 1}, zero=3)
    planner = replace(_planner("chain", "two nodes of 2"), pinned=pinned)
    for share, meshes in ((0.45, {quintnet.Mesh(dp=4)}), (1.0, {quintnet.Mesh(dp=4), quintnet.Mesh(dp=2, ep=2)})):
        pricing, state = planner.pricing(), 4 * planner.parameter_bytes()
        assert planner.search(1, "time", SearchEffort(), pricing=pricing, memory_bytes=share * state).ranked
        assert {layout.mesh for layout, _ in pricing.known} == meshes


def _folded(model: nn.Module, batch: Any) -> Folded:
    return FoldBlocks()(Normalize(ROWS, torch.device("cpu"))(capture(model, batch)))


@pytest.mark.slow
def test_blocks_are_folded_and_chosen_as_in_the_whole_model() -> None:
    axes = (Axis("dp", 2, "data"), Axis("tp", 2, "model"))
    for model, batch, left in ((*_gpt(8, 64), 3), (*_chain(13), 7)):
        program = Normalize(ROWS, torch.device("cpu"))(capture(model, batch))
        folded = FoldBlocks()(program)
        assert len(folded.blocks) == left and sum(folded.repeats.values()) == len(program.graph.nodes)
        whole = ChooseSharding(axes, RuleBook(RULES), Roofline())(program)
        some = ChooseSharding(axes, RuleBook(RULES), Roofline(), ShardingOptions(), folded.repeats)(folded.program)
        expected = {node.name: found for node, found in whole.strategies.items()}
        assert all(expected[node.name] == found for node, found in some.strategies.items())


class Collected(nn.Module):
    """Every block's result is read at the end, so that none stands for another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for block in self.blocks:
            x = block(x).relu()
            found.append(x)
        return torch.stack(found).square().mean()


def test_blocks_that_others_read_are_not_folded() -> None:
    folded = _folded(Collected(), (torch.randn(ROWS, 8),))
    assert set(folded.repeats.values()) == {1} and len(folded.blocks) == 6


@pytest.mark.slow
def test_units_of_a_folded_model_are_those_of_the_whole() -> None:
    planner = replace(_planner("gpt", "2 of a node"), folded=_folded(*_gpt(6, 64)))
    program = Normalize(ROWS, torch.device("cpu"))(capture(*_gpt(6, 64)))
    home = {node: block for block, nodes in block_members(program.graph).items() for node in nodes}
    alone = {block: (block[1],) for block in home.values()}
    whole = Folded(program, dict.fromkeys(program.graph.nodes, 1), alone, home)
    plain = Planner(whole, planner.machine, planner.pinned, planner.rules, planner.workload)
    for layout in list(layouts(planner.limits()))[::7]:
        a, b = (one.builder()(layout) for one in (planner, plain))
        assert [(u.forward, u.backward, u.saved, u.parameters) for u in a] == [
            (u.forward, u.backward, u.saved, u.parameters) for u in b
        ]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=9), st.integers(2, 4))
def test_cuts_equal_brute_force(work: list[int], stages: int) -> None:
    stages = min(stages, len(work))
    total = np.concatenate([[0.0], np.cumsum(np.array(work, float))])
    starts = balanced_starts(total[None, :] - total[:, None], stages)

    def price(starts: tuple[int, ...]) -> tuple[float, float]:
        loads = np.diff(total[[0, *starts, len(work)]])
        return float(loads.max()), float((loads**2).sum())

    assert price(tuple(starts)) == min(price(cut) for cut in itertools.combinations(range(1, len(work)), stages - 1))


@pytest.mark.slow
def test_a_cluster_in_place_of_a_mesh_trains_the_model() -> None:
    model, batch = _gpt(4, 64)
    program = quintnet.compile(model, CLUSTERS["two nodes of 2"], batch, device="cpu")
    assert program.mesh.size == 4 and program.verify().ok


@pytest.mark.slow
def test_pinned_decisions_stay_and_estimates_agree() -> None:
    model, batch = _gpt(4, 64)
    cluster = CLUSTERS["two nodes of 2"]
    pinned = {"mesh": {"tp": 2, "pp": 2}, "recompute": "full"}
    report = quintnet.plan(model, cluster, batch, plan=pinned)
    assert report.best.mesh == {"pp": 2, "tp": 2}
    assert all(plan.recompute == "full" for plan in report.plans)
    again = quintnet.estimate(model, cluster, batch, report.best)
    assert again.seconds == report.found.ranked[0].seconds and again.begins == report.best.stages
    assert report.to_json().replace(str(report.seconds), "") == _same_again(model, cluster, batch, pinned)
    assert quintnet.compile(model, quintnet.Mesh(**report.best.mesh), batch, plan=report.best).verify().ok


def _same_again(model: nn.Module, cluster: quintnet.Cluster, batch: Any, pinned: dict[str, Any]) -> str:
    report = quintnet.plan(model, cluster, batch, plan=pinned)
    return report.to_json().replace(str(report.seconds), "")


@pytest.mark.slow
def test_estimates_follow_the_schedule() -> None:
    """One model on four ranks: each schedule's bubble is smaller than the one before, and memory is that of ranks."""
    model, cluster = _chain(16, 256)[0], quintnet.Cluster("h100", nodes=1)
    batch = (torch.randn(8, 256),)
    found = {}
    for schedule, count in (("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2), ("synthesized", 2)):
        plan = {"mesh": {"pp": 4}, "microbatches": 8, "schedule": schedule, "virtual_stages": count}
        found[schedule] = quintnet.estimate(model, cluster, batch, plan)
        assert len(found[schedule].memory) == 4 and len(found[schedule].begins) == 4 * count - 1
    assert found["1f1b"].pipeline > found["zb-h1"].pipeline
    assert found["1f1b"].pipeline > found["synthesized"].pipeline
    assert found["1f1b"].bubble > found["interleaved"].bubble > found["zb-v"].bubble
    # the same layers are on one rank: there, and back again
    parameters = sum(rank.parameters for rank in found["1f1b"].memory)
    table = 256 * 256 * 4  # used at both ends
    assert sum(rank.parameters for rank in found["zb-v"].memory) == parameters - table
    with pytest.raises(quintnet.CompileError, match="QN208"):
        quintnet.plan(model, cluster, batch, plan={"schedule": "zb-v", "virtual_stages": 3})


@pytest.mark.slow
def test_a_plan_of_several_stages_per_rank_is_made_and_compiles() -> None:
    (model, batch), cluster = _chain(), quintnet.Cluster("h100", nodes=1, gpus_per_node=4)
    pinned = {"mesh": {"pp": 2, "dp": 2}, "schedule": "interleaved", "virtual_stages": 2, "microbatches": 2}
    best = quintnet.plan(model, cluster, batch, plan=pinned, top_k=1).best
    assert best.virtual_stages == 2 and len(best.stages) == 3
    program = quintnet.compile(model, quintnet.Mesh(**best.mesh), batch, plan=best)
    assert program.schedule.placement == (0, 1, 0, 1) and len(program.plan.stages) == 3


@pytest.mark.slow
def test_saved_values_go_to_the_host_where_nothing_fits_otherwise() -> None:
    case = CASES["mlp"]
    batch, kept = case.batch(4096), {"microbatches": 1, "recompute": "none", "mesh": {"dp": 1}}
    device = {
        "name": "small", "tflops": {"fp32": 60, "bf16": 900}, "memory_gb_per_second": 3000, "link_gb_per_second": 400,
        "network_gb_per_second": 50, "host_gb_per_second": 64,
    }  # fmt: skip

    def asked(gigabytes: float) -> quintnet.PlanReport:
        cluster = quintnet.Cluster({**device, "memory_gb": gigabytes}, 1, 1)
        return quintnet.plan(build("mlp"), cluster, batch, loss_fn=case.loss_fn, plan=kept, reserve=0.0)

    plenty = asked(1.0)
    plain = plenty.found.ranked[0]
    found = asked(0.8 * plain.memory_bytes / 1e9)
    assert found.best.offload == ("activations",) and "nothing fits without" in str(found)
    assert found.found.ranked[0].memory_bytes < 0.8 * plain.memory_bytes < plain.memory_bytes
    assert plenty.best.offload == ()


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096), nn.Linear(4096, 1024)

    def forward(self, x: Tensor) -> Any:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Pair(nn.Module):
    """Nothing but products, which take long to compute again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4096, 4096), nn.Linear(4096, 4096)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x))


def on_one(make: Callable[[], nn.Module], width: int, gigabytes: float, host: float, **given: Any) -> Any:
    """Plans of eight such blocks on one device with so much memory, and so many GB/s to its host."""
    with torch.device("meta"):
        model, batch = nn.Sequential(*(make() for _ in range(8))), (torch.empty(65536, width),) * 2
    device = {
        "name": "small", "tflops": {"fp32": 60, "bf16": 900}, "memory_gb_per_second": 3000, "memory_gb": gigabytes,
        "link_gb_per_second": 400, "network_gb_per_second": 50, "host_gb_per_second": host,
        "host_memory_gb_per_second": 200,
    }  # fmt: skip
    plan = {"microbatches": 1, "mesh": {"dp": 1}, **given}
    cluster = quintnet.Cluster(device, 1, 1)
    return quintnet.plan(model, cluster, batch, loss_fn=torch.nn.functional.mse_loss, plan=plan, reserve=0.0)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("host", "better"), [(2000, True), (2, False)], ids=["fast link", "slow link"])
def test_the_host_is_weighed_against_computing_again(host: float, better: bool) -> None:
    """Where saved values do not fit, the faster of both wins, or both together."""

    def asked(gigabytes: float, **given: Any) -> quintnet.PlanReport:
        return on_one(Wide, 1024, gigabytes, host, **given)

    plain = asked(1000.0)
    assert plain.best.recompute == "none" and not plain.best.offload
    tight = 0.7 * plain.found.ranked[0].memory_bytes / 1e9
    again, found = asked(tight, offload=()), asked(tight)
    assert again.best.recompute != "none"
    assert (found.best.offload == ("activations",)) is better and ("takes" in found.note) is better
    if not better:
        assert found.found.ranked[0] == again.found.ranked[0]
        return
    first = found.found.ranked[0]
    assert first.seconds < again.found.ranked[0].seconds and first.memory_bytes <= 1e9 * tight
    assert first.seconds == min(
        one.seconds
        for kind in ("none", "selective", "full")
        for one in asked(tight, offload=("activations",), recompute=kind).found.ranked
    )
    assert found.ask.known() and found.why_not(offload=()).other == again.found.ranked[0]


@pytest.mark.slow
def test_an_optimizer_on_the_host_is_weighed_against_computing_again() -> None:
    """Its state is all that does not fit, and a batch takes much longer than its update. With parameters there, too,
    copies run beside computing."""
    plain = on_one(Pair, 4096, 1000.0, 16).found.ranked[0]
    state = plain.memory[0].optimizer
    tight = (plain.memory_bytes - 0.9 * state) / 1e9
    again, found, outside = (
        on_one(Pair, 4096, tight, 16, **given) for given in ({"offload": ()}, {}, {"offload": ("optimizer",)})
    )
    best, there = found.found.ranked[0], outside.found.ranked[0]
    assert (there.memory_bytes, there.host_bytes) == (plain.memory_bytes - state, 2 * state)
    assert there.pipeline == plain.pipeline and there.optimizer > plain.optimizer and "of its host" in str(there)
    assert found.best.offload == ("parameters",) and "parameters, gradients and the optimizer are on" in found.note
    assert again.best.recompute != "none" == found.best.recompute == outside.best.recompute
    assert best.seconds < there.seconds < again.found.ranked[0].seconds
    assert found.why_not(offload=()).other == again.found.ranked[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", [{"mesh": {"dp": 4}, "zero": 2}, {"mesh": {"pp": 2, "tp": 2}, "microbatches": 2}])
def test_an_optimizer_on_the_host_is_priced_as_it_is_simulated(plan: dict[str, Any]) -> None:
    """What each of the ranks of a stage updates is a share of it in prices, and whole parameters in the program."""
    case, cluster = CASES["gpt"], quintnet.Cluster("h100", 1, 4)
    given: Any = {**plan, "offload": ("optimizer",)}
    model, batch = build("gpt"), case.batch(16)
    found = quintnet.estimate(model, cluster, batch, plan=given, loss_fn=case.loss_fn)
    plain = quintnet.estimate(model, cluster, batch, plan=plan, loss_fn=case.loss_fn)
    mesh = quintnet.Mesh(**plan["mesh"])
    rows = quintnet.compile(model, mesh, batch, plan=given, loss_fn=case.loss_fn).simulate(cluster).rows
    slowest = max(row.update.seconds for row in rows if row.update)
    assert found.optimizer == pytest.approx(slowest, rel=0.15) and found.optimizer > 10 * plain.optimizer
    for stage, before, row in zip(found.memory, plain.memory, rows, strict=True):
        assert row.update and stage.host == pytest.approx(row.update.host_bytes, rel=0.3)
        assert stage.optimizer == 0 < before.optimizer and before.total - stage.total == before.optimizer
    assert {row.host_bytes for row in rows} == {row.update.host_bytes for row in rows if row.update}


def test_what_does_not_fit_comes_with_what_does() -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.device("meta"):
                self.blocks = nn.ModuleList(nn.Linear(2**15, 2**15, bias=False) for _ in range(8))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = x + block(x)
            return x.square().mean()

    batch = (torch.empty(ROWS, 2**15, device="meta"),)
    one, two = (quintnet.Cluster("h100", nodes=1, gpus_per_node=devices) for devices in (1, 2))
    with pytest.raises(quintnet.CompileError) as caught:
        quintnet.plan(Large(), one, batch, plan={"offload": ()})
    assert caught.value.code == "QN212" and "use 2 devices: " in str(caught.value.fix)
    assert quintnet.plan(Large(), two, batch).best.mesh
    outside = quintnet.plan(Large(), one, batch)
    assert outside.best.offload == ("optimizer",) and "the optimizer computes on the host" in outside.note


MODULE = """
import torch
from torch import nn

def build():
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
    return model, (torch.randn(8, 64), torch.randint(0, 8, (8,))), nn.functional.cross_entropy
"""


@pytest.mark.slow
def test_the_command_plans_and_estimates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny_of_the_planner.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    cluster = ["--gpu", "a100", "--gpus-per-node", "2"]
    target = "tiny_of_the_planner:build"
    made = CliRunner().invoke(app, ["plan", target, *cluster, "--json", "--out", "plan.json"])
    assert made.exit_code == 0, made.output
    best = json.loads(made.stdout)["plans"][0]
    found = CliRunner().invoke(app, ["estimate", target, *cluster, "--plan", "plan.json", "--json"])
    assert json.loads(found.stdout)["step_seconds"] == best["step_seconds"]
    assert best["layout"] in CliRunner().invoke(app, ["estimate", target, *cluster, "--plan", "plan.json"]).stdout


class Coupled(nn.Module):
    """Every row of the batch against every other: no microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return nn.functional.cross_entropy(y @ y.t(), torch.arange(x.shape[0]))


def test_slices_stay_in_a_node_where_the_network_is_slow() -> None:
    """Hybrid sharding is found where it wins; what it holds is what its program holds."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(6)))
    batch = (torch.randn(64, 512), torch.randn(64, 512))
    plan = {"zero": 3, "recompute": "none", "microbatches": 2}
    cluster = quintnet.Cluster("h100", nodes=2, gpus_per_node=4, network_bytes_per_second=1e9)
    data = {**plan, "mesh": {"pp": 1, "tp": 1}}
    for least, mesh in (("time", {"dp": 2, "ep": 4}), ("memory", {"dp": 8})):
        report = quintnet.plan(model, cluster, batch, loss_fn=F.mse_loss, plan=data, objective=least)
        assert report.found.complete and report.best.mesh == mesh
        assert report.best.zero_axes == (("ep",) if "ep" in mesh else ("dp",))
    found = quintnet.estimate(
        model, cluster, batch, {**plan, "mesh": {"dp": 2, "ep": 4}, "zero_axes": ["ep"]}, loss_fn=F.mse_loss
    )
    whole = sum(p.numel() * p.itemsize for p in model.parameters())
    assert str(found.layout) == "dp=2 x ep=4, 2 x 4 rows, ZeRO 3 over ep"
    assert found.memory[0].parameters == pytest.approx(whole / 4, rel=0.01)
    program = quintnet.compile(
        model, quintnet.Mesh(dp=2, ep=4), batch, loss_fn=F.mse_loss, zero=3, zero_axes=("ep",), microbatches=2
    )
    assert program.simulate().rows[0].parameter_bytes == pytest.approx(found.memory[0].parameters, rel=0.01)


def test_a_loss_that_couples_rows_is_planned_without_microbatches() -> None:
    report = quintnet.plan(Coupled(), CLUSTERS["2 of a node"], (torch.randn(ROWS, 16),))
    assert {plan.microbatches for plan in report.plans} == {1}


@pytest.mark.slow
def test_ranks_that_a_cluster_has_no_devices_for_are_refused() -> None:
    model, batch = _gpt(2, 64)
    program = quintnet.compile(model, quintnet.Mesh(dp=2, tp=2), batch)
    with pytest.raises(quintnet.CompileError, match="QN301"):
        program.simulate(CLUSTERS["2 of a node"])


def test_grouped_heads_are_not_taken_for_a_causal_mask() -> None:
    graph, x = torch.fx.Graph(), torch.empty(1, 4, 8, 16)
    inputs = [annotate(graph.placeholder(name), Facts(x)) for name in "qkv"]
    attend = torch.ops.aten.scaled_dot_product_attention.default
    whole = [graph.call_function(attend, tuple(inputs), {"enable_gqa": flag}) for flag in (False, True)]
    causal = graph.call_function(attend, (*inputs, None, 0.0, True))
    assert attention_flops(whole[0]) == attention_flops(whole[1]) == 2 * attention_flops(causal)


@pytest.mark.slow
def test_cost_counts_device_seconds() -> None:
    model, batch = _gpt(4, 64)
    cluster = quintnet.Cluster("h100", nodes=4, gpus_per_node=1)
    fast = quintnet.plan(model, cluster, batch, top_k=1).found.ranked[0]
    cheap = quintnet.plan(model, cluster, batch, top_k=1, objective="cost").found.ranked[0]
    alone = quintnet.estimate(model, cluster, batch, {"mesh": {"dp": 1}})
    devices = cheap.layout.mesh.size
    assert fast.layout.mesh.size == 4 and devices < 4
    assert cheap.seconds * devices <= min(alone.seconds, 4 * fast.seconds)


def test_time_that_ran_out_is_not_taken_for_a_model_that_does_not_fit() -> None:
    model, batch = _gpt(4, 64)
    with pytest.raises(quintnet.CompileError, match=r"QN212(?s:.*)in 0 s no layout was found(?s:.*)search longer"):
        quintnet.plan(model, CLUSTERS["2 of a node"], batch, seconds=0)


@pytest.mark.slow
def test_work_that_is_done_ends_a_search_with_the_same_plan_each_time() -> None:
    model, batch = _gpt(4, 64)
    first, second = (quintnet.plan(model, CLUSTERS["two nodes of 2"], batch, work=1, top_k=1) for _ in range(2))
    assert first.found == second.found and first.found.ended == "work" and first.found.left > 0
    assert "were left when the work was done" in str(first) and json.loads(first.to_json())["ended"] == "work"


def test_small_kernels_wait_for_the_host() -> None:
    """Estimates and simulations take the host's time or the device's, whichever is longer: the host's in a small model,
    unless CUDA graphs are replayed."""
    (model, batch), cluster = _chain(3), quintnet.Cluster("h100", 1, 2)
    plan = {"mesh": {"pp": 2}, "microbatches": 2}
    eager, replayed = (quintnet.estimate(model, cluster, batch, plan, backend=name) for name in ("eager", "cudagraphs"))
    assert eager.seconds > 2 * replayed.seconds
    program = quintnet.compile(model, quintnet.Mesh(pp=2), batch, microbatches=2, stages=eager.begins)
    assert program.simulate(cluster).seconds == pytest.approx(eager.seconds, rel=0.1)


def test_a_core_is_its_own_host() -> None:
    model, batch = _chain(2)
    plan, cluster = {"mesh": {"dp": 2}}, quintnet.Cluster("cpu", 1, 2)
    found = [quintnet.estimate(model, cluster, batch, plan, backend=name).seconds
             for name in ("eager", "cudagraphs")]  # fmt: skip
    assert found[0] == found[1]
    with pytest.raises(quintnet.CompileError, match=r"QN108 .*\n.*no backend 'fast'"):
        quintnet.estimate(model, cluster, batch, plan, backend="fast")  # type: ignore[arg-type]
