"""Stages on unlike devices: where they begin, and what they take."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from quintnet_compiler.core.mesh import Mesh
from quintnet_compiler.cost_models.cluster import Cluster
from quintnet_compiler.cost_models.cluster_costs import ClusterCosts
from quintnet_compiler.planner.evaluate import evaluate
from quintnet_compiler.planner.layouts import Layout
from quintnet_compiler.planner.pipeline import most_at_once
from quintnet_compiler.planner.places import Place, are_identical, fractional_seconds, placement
from quintnet_compiler.planner.stage_units import ParameterGroup, StageUnit, Widths
from quintnet_compiler.planner.unlike_stages import unlike_starts
from quintnet_compiler.schedules.kinds import SCHEDULES
from quintnet_compiler.schedules.schedule import chain, with_transfers
from quintnet_compiler.simulation.run import simulate_schedule
from quintnet_compiler.simulation.work import Given

PAIR = Layout(1, 1, 1, 2, 1, 8, 1, "all_gather", (), "1f1b", 1, "none", 0, ("dp",))
COSTS = ClusterCosts(Cluster("h100"))
WIDE = Widths(4, 4, 4, 4, copied=False)


def _units(speed: float, count: int = 12, state: int = 0) -> list[StageUnit]:
    """Blocks that take 1 and 2 seconds, on a device that is so many times as fast."""
    held = (ParameterGroup(state, (), WIDE),) if state else ()
    one = StageUnit("", 0.0, 1 / speed, 2 / speed, 1 / speed, {}, 100, 0, 10, held, {})
    return [replace(one, begin=f"block{i}") for i in range(count)]


def _places(*speeds: float, memory: tuple[float, ...] = (), count: int = 12, state: int = 0) -> list[Place]:
    rooms = memory or (1e12,) * len(speeds)
    return [
        Place(_units(speed, count, state), COSTS, f"kind {speed}", room, max(rooms) / room)
        for speed, room in zip(speeds, rooms, strict=True)
    ]


def _simulated(layout: Layout, places: list[Place], starts: tuple[int, ...]) -> float:
    """Seconds of a step by the simulator of compiled programs."""
    home, edges = placement(layout), [0, *starts, len(places[0].units)]
    parts = [places[there].units[a:b] for there, a, b in zip(home, edges, edges[1:], strict=False)]

    def each(seconds: str) -> dict[int, float]:
        return {stage: sum(getattr(unit, seconds) for unit in part) for stage, part in enumerate(parts)}

    weight, both = each("weight"), each("backward")
    times = Given(each("forward"), both, {stage: both[stage] - weight[stage] for stage in both}, weight, placement=home)
    stages = chain(len(home))
    plain = SCHEDULES[layout.schedule](layout.pp, layout.microbatches, layout.virtual_stages)
    return simulate_schedule(with_transfers(plain, stages), stages, times).seconds


def test_a_stage_has_as_many_blocks_as_its_device_is_fast() -> None:
    for speeds, wanted in (((1.0, 1.0), [6]), ((1.0, 2.0), [4]), ((3.0, 1.0), [9]), ((1.0, 5.0), [2])):
        assert unlike_starts(_places(*speeds), PAIR) == wanted
    assert unlike_starts(_places(1.0, 2.0, 3.0), replace(PAIR, pp=3)) == [2, 6]


@pytest.mark.parametrize(
    ("schedule", "virtual", "microbatches"),
    [("1f1b", 1, 2), ("1f1b", 1, 8), ("zb-h1", 1, 8), ("gpipe", 1, 4), ("interleaved", 2, 8), ("zb-v", 2, 8)],
)
@pytest.mark.parametrize("speeds", [(1.0, 2.3), (1.7, 1.0), (1.0, 1.0)], ids=["fast-last", "fast-first", "equal"])
def test_no_other_cut_is_faster(schedule: str, virtual: int, microbatches: int, speeds: tuple[float, ...]) -> None:
    layout = replace(PAIR, schedule=schedule, virtual_stages=virtual, microbatches=microbatches)
    places = _places(*speeds, count=8)
    starts = unlike_starts(places, layout)
    cuts = itertools.combinations(range(1, 8), 2 * virtual - 1)
    best = min(_simulated(layout, places, cut) for cut in cuts)
    assert _simulated(layout, places, tuple(starts)) == pytest.approx(best, rel=1e-12)
    found = evaluate(places, layout)
    assert found.pipeline == pytest.approx(best, rel=1e-12)  # and the planner's clock is the simulator's


def test_many_cuts_are_not_all_tried_and_one_step_is_no_better() -> None:
    places, layout = _places(1.0, 2.0, 1.3, 2.6, count=60), replace(PAIR, pp=4, microbatches=16)
    starts = unlike_starts(places, layout)
    seconds = _simulated(layout, places, tuple(starts))
    ideal = 60 * 3 / sum((1.0, 2.0, 1.3, 2.6))  # of a microbatch on all at once
    assert seconds < 1.05 * (16 + 3) * ideal
    for boundary, far in itertools.product(range(3), (-1, 1)):
        moved = [start + far * (index == boundary) for index, start in enumerate(starts)]
        assert _simulated(layout, places, tuple(moved)) >= seconds * (1 - 1e-12)


def test_stages_begin_only_where_blocks_do() -> None:
    places = _places(1.0, 2.0)
    joined = [replace(place, units=[replace(u, begin="" if i % 3 else u.begin) for i, u in enumerate(place.units)])
              for place in places]  # fmt: skip
    assert unlike_starts(joined, PAIR) == [3]


# -- memory


def test_how_many_microbatches_a_stage_holds() -> None:
    assert most_at_once("1f1b", 4, 8, 1) == (4, 3, 2, 1) and most_at_once("gpipe", 2, 8, 1) == (8, 8)
    assert most_at_once("1f1b", 4, 64, 1) == (4, 3, 2, 1) and most_at_once("synthesized", 2, 4, 1) == (2, 1)


def test_a_small_device_holds_fewer_blocks() -> None:
    """Equal speeds; of a block, 4 x 1000 bytes stay (parameters, gradients, two moments), and 100 a microbatch."""
    full = 4 * 1000.0
    roomy = evaluate(_places(1.0, 1.0, state=1000), PAIR)
    assert roomy.begins == ("block6",)
    # 4 blocks, of which the first stage holds two microbatches, and what a block works with
    small = evaluate(_places(1.0, 1.0, state=1000, memory=(4 * (full + 200) + 10, 1e12)), PAIR)
    assert small.begins == ("block4",) and small.memory[0].total == 4 * (full + 200) + 10
    less = evaluate(_places(1.0, 1.0, state=1000, memory=(4 * (full + 200) + 9, 1e12)), PAIR)
    assert less.begins == ("block3",)
    behind = evaluate(_places(1.0, 1.0, state=1000, memory=(1e12, 5 * (full + 100) + 10)), PAIR)
    assert behind.begins == ("block7",) and behind.seconds > roomy.seconds
    assert [one.units for one in behind.places] == [7, 5]
    # where nothing fits, the fastest cut is shown, and takes more than there is
    none = evaluate(_places(1.0, 1.0, state=1000, memory=(1e4, 1e4)), PAIR)
    assert none.begins == ("block6",) and none.claimed_bytes > 1e4
    named = evaluate(_places(1.0, 1.0, state=1000, memory=(1e4, 1e12)), PAIR, ("block6",))
    assert named.begins == ("block6",)  # what a plan says is not moved


def test_what_fits_counts_in_shares_of_each_device() -> None:
    found = evaluate(_places(1.0, 1.0, state=1000, memory=(50_000, 100_000)), PAIR)
    assert found.claimed_bytes == max(2 * found.memory[0].total, found.memory[1].total) <= 100_000
    assert found.memory_bytes == max(one.total for one in found.memory)


# -- what is said


def test_reports_say_what_lies_where() -> None:
    places = _places(1.0, 2.0, state=1000)
    places[0] = replace(places[0], alone=(("A", 1.0), ("B", 0.4)))
    found = evaluate(places, PAIR)
    assert found.mixed and [one["devices"] for one in found.numbers()["places"]] == ["kind 1.0", "kind 2.0"]
    text = str(found)
    assert "place 0 on kind 1.0: 4 units, busy" in text and "each waits for the slowest; B would take 40%" in text
    assert "place 1 on kind 2.0: 8 units" in text
    like = evaluate([Place(_units(1.0), COSTS)] * 2, PAIR)
    assert not like.places and "place 0" not in str(like) and like.claimed_bytes == like.memory_bytes


def test_what_no_cut_undercuts() -> None:
    slow, fast = np.full(6, 2.0), np.full(6, 1.0)
    assert fractional_seconds([slow, fast]) == pytest.approx(4.0) and fractional_seconds([fast, fast]) == 3.0
    assert fractional_seconds([slow, fast, fast]) == pytest.approx(6 / 2.5)
    apart = [np.array([1.0, 9.0]), np.array([9.0, 1.0])]  # each unit is fast in one place
    assert fractional_seconds(apart) == pytest.approx(1.0)
    for speeds in ((1.0, 2.3), (1.0, 1.0), (1.0, 2.0, 3.0)):
        places, layout = _places(*speeds), replace(PAIR, pp=len(speeds))
        times = [np.array([unit.forward + unit.backward for unit in place.units]) for place in places]
        busy = max(one.seconds for one in evaluate(places, layout).places) / layout.microbatches
        assert fractional_seconds(times) <= busy * (1 + 1e-9)


def test_places_of_stages() -> None:
    assert placement(replace(PAIR, virtual_stages=2, schedule="interleaved")) == (0, 1, 0, 1)
    assert placement(replace(PAIR, virtual_stages=2, schedule="zb-v")) == (0, 1, 1, 0)
    one = Place(_units(1.0), COSTS)
    assert are_identical([one, one]) and not are_identical([one, replace(one)])
    assert Mesh(pp=2).size == 2
