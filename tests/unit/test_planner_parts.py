"""planner, part by part: the space of layouts, what is tried next, stages, and what is shown."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from unittest.mock import Mock

import pytest

from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.core.mesh import Mesh
from quintnet_compiler.cost_models.cluster import Cluster
from quintnet_compiler.cost_models.cluster_costs import ClusterCosts
from quintnet_compiler.ir.plan import Plan
from quintnet_compiler.planner.bounds import TIME_FACTOR, LayoutBounds
from quintnet_compiler.planner.compare import Versus
from quintnet_compiler.planner.estimate import Estimate, LowerBound, RankBound, StageMemory, bytes_of, time_of
from quintnet_compiler.planner.evaluate import evaluate
from quintnet_compiler.planner.heuristic import DOUBT_FACTORS, UNSEEN_FACTOR, LayoutHeuristic, LearnedRatios
from quintnet_compiler.planner.layouts import Layout, Limits, divisors, layouts, slicings
from quintnet_compiler.planner.places import Place, placement
from quintnet_compiler.planner.report import PlanReport
from quintnet_compiler.planner.search import Rejected, SearchResult
from quintnet_compiler.planner.stage_units import ParameterGroup, StageUnit, Widths
from quintnet_compiler.planner.stages import Slices, cut_units, parameter_groups, send_seconds, stage_work
from quintnet_compiler.schedules.kinds import SCHEDULES

ONE = Layout(1, 1, 1, 1, 1, 1, 8, "all_gather", (), "1f1b", 1, "none", 0, ("dp",))
COSTS = ClusterCosts(Cluster("h100"))
WIDE = Widths(4, 4, 4, 4, copied=False)


def _unit(begin: str, forward: float = 1.0, **changes: object) -> StageUnit:
    plain = StageUnit(begin, 0.0, forward, 2 * forward, forward, {}, 100, 10, 50, (), {})
    return replace(plain, **changes)  # type: ignore[arg-type]


# -- layouts


def test_every_layout_of_two_devices() -> None:
    limits = Limits(
        (2,), 4, dict.fromkeys(("tp", "cp", "ep", "pp", "dp"), (1, 2)), ("ring",), ((),), ("1f1b",), (1,),
        ("none",), (0, 1), ("dp",), (1, 2), units=2,
    )  # fmt: skip
    found = {str(one) for one in layouts(limits)}
    assert {"tp=2, 1 x 4 rows", "tp=2, 2 x 2 rows", "cp=2, 1 x 4 rows, ring", "dp=2, 1 x 2 rows, ZeRO 1"} <= found
    assert "pp=2, 2 x 2 rows" in found and "pp=2, 1 x 4 rows" not in found  # stages want as many microbatches
    assert divisors(1) == (1,) and divisors(9) == (1, 3, 9)


def test_slices_are_over_what_is_best() -> None:
    """Weights have two dims, of which tp takes one; hybrid sharding is over whole nodes."""
    limits = Limits((64,), 64, {}, (), (), (), (), (), (), None, (), 1, node=8)

    def ways(**sizes: int) -> list[tuple[str, ...]]:
        found = slicings(replace(ONE, zero=3, **sizes), limits)
        return [(*one.zero_axes, *(f"{one.dp} x {one.ep}" for _ in "." if one.ep > 1)) for one in found]

    assert ways(dp=8) == [("dp",)]
    assert ways(dp=64) == [("dp",), ("ep", "8 x 8"), ("ep", "2 x 32")]
    assert ways(dp=8, tp=8) == [("dp",), ("ep", "2 x 4")]
    assert ways(dp=8, cp=2, tp=2, zero_axes=("dp",)) == [("dp",), ("cp",), ("ep", "4 x 2")]
    assert ways(dp=16, cp=2, zero_axes=("dp", "cp"))[:3] == [("dp", "cp"), ("dp",), ("cp",)]
    assert ways(dp=16, cp=2, zero_axes=("dp", "cp"))[3:] == [("ep", "cp", "4 x 4")]
    assert [*slicings(replace(ONE, dp=64), limits)] == [replace(ONE, dp=64)]
    hybrid = replace(ONE, dp=8, ep=8, zero=3, zero_axes=("ep",))
    assert str(hybrid) == "dp=8 x ep=8, 1 x 8 rows, ZeRO 3 over ep"
    assert hybrid.mesh == Mesh(dp=8, ep=8) and str(replace(hybrid, zero_axes=("dp", "ep"))).endswith("ZeRO 3")


def test_ranks_of_two_data_axes_share_gradients_over_both() -> None:
    held = ParameterGroup(2**20, ("dp",), WIDE).over_two_axes()
    cluster = ClusterCosts(Cluster("h100", nodes=2))
    slices = Slices(replace(ONE, dp=2, ep=8, zero=3, zero_axes=("ep",)), cluster, Mesh(dp=2, ep=8))
    assert held.axes == ("dp", "ep") and slices.count(held) == 8
    assert slices.gather_seconds([held]) == cluster.group_seconds("all_gather", 2**20, tuple(range(8)))
    assert slices.reduce_seconds([held]) == cluster.group_seconds(
        "all_reduce", 2**20 / 8, (0, 8)
    )  # of slices, over copies
    assert ParameterGroup(64, ("ep",), WIDE).over_two_axes().axes == ("ep",)


def test_a_layout_decides_a_plan() -> None:
    layout = replace(ONE, pp=2, dp=2, microbatches=4, rows=1, zero=1)
    plan = layout.decided(Plan(seed=5))
    assert (plan.mesh, plan.microbatches, plan.zero, plan.seed) == ({"pp": 2, "dp": 2}, 4, 1, 5)
    assert layout.mesh == Mesh(pp=2, dp=2) and ONE.mesh == Mesh(dp=1)
    assert replace(layout, pp=4, recompute="full").sharded == layout.sharded  # the same functions, run more often


# -- what is tried next


def test_what_was_learned_counts_most_for_what_is_most_alike() -> None:
    learned = LearnedRatios()
    assert learned.factor(("a", "b", "c", "d")) == 1
    learned.learn(("a", "b", "c", "d"), 2.0)
    assert (
        learned.factor(("a", "b", "c", "d")) == 2 * DOUBT_FACTORS[0]
        and learned.factor(("x", "b", "c", "d")) == 2 * DOUBT_FACTORS[1]
    )
    assert learned.factor(("x", "x", "x", "x")) == 2 * UNSEEN_FACTOR
    learned.learn(("a", "b", "c", "d"), 8.0)
    assert learned.factor(("a", "b", "c", "d")) == pytest.approx(4 * DOUBT_FACTORS[0])  # the geometric mean


def test_the_most_promising_that_is_likely_to_fit_comes_first() -> None:
    least, memory = {"fast": 1.0, "big": 0.5, "slow": 3.0}, {"fast": 5.0, "big": 50.0, "slow": 1.0}
    heuristic = LayoutHeuristic(dict(memory), 10.0, least, lambda one: 0.0, lambda one: (one, one, one, one))
    assert heuristic.next(math.inf) == "fast"
    del heuristic.open_layouts["fast"]
    assert heuristic.next(2.0) is None and heuristic.next(math.inf) in ("slow", None)


# -- stages


def test_stages_are_balanced_and_begin_where_blocks_do() -> None:
    units = [_unit(""), _unit("a"), _unit(""), _unit("b"), _unit("c")]
    layout = replace(ONE, pp=2)
    first, second = cut_units(units, layout, COSTS)
    assert len(first) == 3 and second[0].begin == "b"  # 3 + 2 units; no stage begins at the one without a name
    assert [stage[0].begin for stage in cut_units(units, layout, COSTS, ["c"])] == ["", "c"]
    with pytest.raises(CompileError, match="5 stages, where the model can begin 4"):
        cut_units(units, replace(ONE, pp=5), COSTS)
    with pytest.raises(CompileError, match="x lies inside a block"):
        cut_units(units, layout, COSTS, ["x"])


def test_a_send_is_priced_by_the_links_between_its_ranks_and_is_no_work() -> None:
    cluster = ClusterCosts(Cluster("h100", nodes=2))
    units = [_unit(name, received=2**26 if name == "c" else 2**20) for name in "abcdefgh"]
    layout = replace(ONE, pp=4, tp=4)  # two places in each node
    stages = cut_units(units, layout, cluster)
    assert [len(stage) for stage in stages] == [2, 2, 2, 2]  # although less crosses elsewhere
    near, far = (send_seconds(units[0], cluster, layout.mesh, way) for way in ((0, 1), (1, 2)))
    assert near == cluster.send_seconds(2**20, 0, 4) < far == cluster.send_seconds(2**20, 4, 8)
    slow = replace(layout, pp=2, dp=2)  # every place is a node
    one, other = (evaluate([Place(units, cluster)] * x.pp, x) for x in (replace(layout, pp=2), slow))
    assert other.pipeline - one.pipeline == pytest.approx(2 * (far - near))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v", "dualpipe-v"])
def test_stages_are_where_their_schedule_has_them(name: str) -> None:
    virtual = 1 if name in ("gpipe", "1f1b", "zb-h1") else 2
    assert SCHEDULES[name](4, 8, virtual).placement == placement(
        replace(ONE, pp=4, schedule=name, virtual_stages=virtual)
    )


def test_what_ranks_hold_and_slice() -> None:
    own, shared = ParameterGroup(64, ("dp",), WIDE), ParameterGroup(16, ("dp",), WIDE)
    stage = [_unit("a", parameters=(own,), tied={"e": shared}), _unit("b", parameters=(own,), tied={"e": shared})]
    assert parameter_groups(stage, {"e": 2}) == [
        ParameterGroup(128, ("dp",), WIDE),
        ParameterGroup(16, ("dp", "pp"), WIDE),
    ]
    mesh = Mesh(dp=4)
    for zero, ways in ((0, 1), (1, 4), (3, 4)):
        assert Slices(replace(ONE, dp=4, zero=zero), COSTS, mesh).count(own) == ways
    narrow = ParameterGroup(64, ("dp",), Widths(4, 2, 2, 4, copied=True))
    assert (narrow.read, narrow.gradients, narrow.reduced) == (32, 32, 64)


def test_zero_3_gathers_before_each_use() -> None:
    stage, mesh = [_unit("a", parameters=(ParameterGroup(2**20, ("dp",), WIDE),))], Mesh(dp=4)
    plain, zero2, zero3 = (
        stage_work(stage, True, Slices(replace(ONE, dp=4, zero=zero), COSTS, mesh)) for zero in (0, 2, 3)
    )
    gather = COSTS.group_seconds("all_gather", 2**20, (0, 1, 2, 3))
    scatter = COSTS.group_seconds("reduce_scatter", 2**20, (0, 1, 2, 3))
    assert plain.forward == 1.0 and zero2.seconds == pytest.approx(plain.seconds + scatter)
    assert zero3.forward == pytest.approx(1.0 + gather)


def test_a_stage_keeps_what_it_sends_and_what_its_weight_half_reads() -> None:
    stage, mesh = [_unit("a", saved_for_weight=130), _unit("b", saved_for_weight=90, shared=4)], Mesh(pp=2)

    def saved(schedule: str, sent: int) -> int:
        return stage_work(stage, True, Slices(replace(ONE, pp=2, schedule=schedule), COSTS, mesh), sent=sent).saved

    assert [saved("1f1b", sent) for sent in (0, 3, 10)] == [200, 200, 206]
    assert saved("zb-h1", 10) == 130 + 100 + 6


def test_slices_travel_beside_the_work_of_their_neighbours() -> None:
    stage = [_unit(name, parameters=(ParameterGroup(2**20, ("dp",), WIDE),)) for name in "abc"]
    slices = Slices(replace(ONE, dp=4, zero=3), COSTS, Mesh(dp=4))
    gather = COSTS.group_seconds("all_gather", 2**20, (0, 1, 2, 3))
    scatter = COSTS.group_seconds("reduce_scatter", 2**20, (0, 1, 2, 3))
    forward, backward = slices.waits(stage)
    # the first gather and the last scatter are waited for; what is hidden costs what it takes from computing
    assert forward == pytest.approx(gather + slices.overlap_loss(2 * gather))
    assert backward == pytest.approx(scatter + slices.overlap_loss(2 * gather + 2 * scatter))
    assert 0 < slices.overlap_loss(gather) < gather


# -- bounds


def test_a_split_model_takes_at_least_its_share() -> None:
    bounds = LayoutBounds(lambda layout: [_unit("a", 8.0)], COSTS, parameters=1600, routed=0, batch=8)
    whole = bounds.seconds(ONE)
    assert whole == pytest.approx(TIME_FACTOR * (8 + 16))
    assert bounds.seconds(replace(ONE, tp=4)) == pytest.approx(whole / 4)
    state = bounds.bytes(replace(ONE, dp=2, rows=4)) - bounds.bytes(replace(ONE, dp=2, rows=4, zero=1))
    assert state == pytest.approx(2 * 1600 / 2)  # ZeRO 1 halves the two moments


# -- what is shown


def _estimate(layout: Layout, seconds: float) -> Estimate:
    memory = (StageMemory(100, 100, 200, 50, 25, 100), StageMemory(10, 10, 20, 5, 5, 10))
    return Estimate(layout, seconds, seconds / 4, 0.5, 0.25, {"tp": 0.125}, memory, ("blocks.1",))


def test_an_estimate_adds_up() -> None:
    found = _estimate(ONE, 2.0)
    assert (found.seconds, found.memory_bytes, found.exposed) == (2.75, 475, 0.625)
    assert json.loads(found.to_json())["stage_memory_bytes"][1]["total"] == 50
    assert "step 2.75 s: pipeline 2 s (bubble 500 ms)" in str(found)
    assert (bytes_of(2**30), bytes_of(2**19), time_of(0.0123)) == ("1.0 GiB", "0.5 MiB", "12.3 ms")


def test_two_layouts_part_by_part() -> None:
    versus = Versus(_estimate(ONE, 2.0), _estimate(replace(ONE, tp=2), 4.0))
    rows = {name.strip(): (a, b) for name, a, b in versus.rows()}
    assert rows["pipeline"] == (2.0, 4.0) and rows["of it waiting for tp"] == (0.125, 0.125)
    assert rows["memory"] == (475, 475) and "+100.0%" in str(versus)
    refused = Versus(_estimate(ONE, 2.0), None, "nothing fits")
    assert list(refused.rows()) == [] and str(refused).endswith("nothing fits")
    assert json.loads(refused.to_json())["other"] is None


def test_a_report_counts_reasons_that_differ_in_numbers_alone() -> None:
    found = _search_result()
    report = PlanReport("1 node", 8, 1e9, 0.08, found, (Plan(),), 0.5, Mock(known=lambda: found.ranked))
    text = str(report)
    assert "rejected 2: needs 3 GiB (tp=2" in text and report.best == Plan()
    assert len(json.loads(report.to_json())["rejected"]) == 2 and "<table>" in report._repr_html_()


def _search_result() -> SearchResult[Layout, Estimate]:
    rejected = tuple(Rejected(replace(ONE, tp=tp), f"needs {tp + 1} GiB") for tp in (2, 4))
    return SearchResult((_estimate(ONE, 2.0),), rejected, 0, "proof")


# -- memory of gradients

MIB = 2**20


@pytest.mark.parametrize(
    ("changed", "widths", "tied", "expected"),
    [
        # of 256, a sixteenth and a parameter of 16 may be there early: at the third unit, 128 + 32
        ({}, WIDE, False, (400, 160)),
        ({"microbatches": 2, "schedule": "gpipe"}, WIDE, False, (800, 160)),
        ({"microbatches": 2}, WIDE, False, (400, 256)),  # forward again when all of them are there
        ({"schedule": "zb-h1"}, WIDE, False, (400, 256)),
        ({"dp": 2}, WIDE, False, (400, 176)),  # a message of an eighth
        # copies that ranks add up come with the last backward: those of two units of four
        ({"dp": 2}, Widths(4, 4, 4, 2, copied=False), False, (400, 256 + 64)),
        ({"dp": 2, "microbatches": 2}, Widths(4, 4, 4, 2, copied=False), False, (400, 256 + 64)),
        ({}, WIDE, True, (400 + 32, 128 + 18 + 16)),  # the last unit's term of a matrix, beside
    ],
    ids=str,
)
def test_gradients_come_while_saved_values_go(
    changed: dict[str, object], widths: Widths, tied: bool, expected: tuple[int, int]
) -> None:
    layout = replace(ONE, **changed)  # type: ignore[arg-type]
    held = ParameterGroup(64 * MIB, ("dp",) if layout.dp > 1 else (), widths)
    units = [_unit(f"b{i}", saved=100 * MIB, parameters=(held,), largest_gradient=16 * MIB) for i in range(4)]
    for index in (0, 3) if tied else ():
        units[index] = replace(units[index], tied={"table": ParameterGroup(32 * MIB, (), widths)})
    (found,) = evaluate([Place(units, COSTS)], layout).memory
    assert (found.saved / MIB, found.gradients / MIB) == expected
    assert found.settled == (256 + 32 * tied) * MIB and found.total == sum(found.parts.values())


def test_no_bound_counts_gradients_before_they_come() -> None:
    """Of a rank that saves all microbatches first: the larger of the two; of others, both."""
    for early, most in ((True, 300), (False, 400)):
        assert LowerBound(ranks=(RankBound(300.0, 1.0, early),)).fullest_rank_bytes(1000.0, 100.0) == 1000 + most
    assert LowerBound(ranks=(RankBound(50.0, 2.0, True),)).fullest_rank_bytes(1000.0, 100.0) == 2000 + 200
