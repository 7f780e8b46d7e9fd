"""The event simulation against closed forms: bubbles, stragglers, slow links, sharing of cores; and its reports."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.closed_forms.expressions import bubble_share, zero_bubble_share
from benchmarks.closed_forms.pipeline_time import Stage, interleaved_seconds
from quintnet import Mesh
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.schedules.kinds import SCHEDULES, interleaved, one_f_one_b, zero_bubble_h1, zero_bubble_v
from quintnet_compiler.schedules.schedule import Action, Op, Schedule, ScheduleError, chain, with_transfers
from quintnet_compiler.schedules.schedule import earliest_spans as simulate_plainly
from quintnet_compiler.schedules.sends import arrived_sends
from quintnet_compiler.simulation.faults import Faults
from quintnet_compiler.simulation.run import Setting, simulate_schedule
from quintnet_compiler.simulation.timeline import Event, RankTimeline, Timeline
from quintnet_compiler.simulation.work import Given


def run(schedule: Schedule, durations: Given | None = None, setting: Setting | None = None) -> Timeline:
    edges = chain(schedule.num_stages)
    return simulate_schedule(with_transfers(schedule, edges), edges, durations or Given(), setting)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_bubble_of_one_stage_per_rank(name: str) -> None:
    for p, m in product((1, 2, 3, 4, 6, 8), (1, 2, 3, 5, 8, 16)):
        found = run(SCHEDULES[name](p, m))
        assert found.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-12), (p, m)
        assert found.seconds == 3 * (m + p - 1)


def test_bubble_of_several_stages_per_rank() -> None:
    for p, groups, v in product((1, 2, 3, 5), (1, 2, 3), (1, 2, 4)):
        m = p * groups
        found = run(interleaved(p, m, v) if v > 1 else one_f_one_b(p, m))
        assert found.bubble == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12), (p, m, v)
        assert found.bubble / (1 - found.bubble) == pytest.approx(bubble_share(p, m, v), abs=1e-12)
        assert found.seconds == pytest.approx(interleaved_seconds([Stage(v, 2 * v)] * p, m, v))


def test_bubble_of_split_backwards() -> None:
    for p, m in product(range(1, 6), range(5, 10)):
        for make, v in ((zero_bubble_h1, 1), (zero_bubble_v, 2)):
            if m >= v * p - 1:
                found = run(make(p, m), Given(forward=1, backward=2, input=1, weight=1))
                assert found.bubble == pytest.approx((p - 1) / (3 * v * m + p - 1), abs=1e-12), (p, m)
                idle_over_busy = found.bubble / (1 - found.bubble)
                assert idle_over_busy == pytest.approx(zero_bubble_share(p, m, v), abs=1e-12)


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 5), st.integers(1, 6), st.data())
def test_without_transfers_it_is_the_plain_simulation(p: int, m: int, data: st.DataObject) -> None:
    times = lambda count: st.lists(st.integers(1, 9), min_size=count, max_size=count)  # noqa: E731
    schedule = SCHEDULES[data.draw(st.sampled_from(sorted(SCHEDULES)))](p, m)
    forward, backward = (dict(enumerate(data.draw(times(schedule.num_stages)))) for _ in range(2))
    found = run(schedule, Given(forward=forward, backward=backward))
    halves = {stage: seconds / 2 for stage, seconds in backward.items()}
    table = {Op.FORWARD: forward, Op.BACKWARD: backward, Op.BACKWARD_INPUT: halves, Op.BACKWARD_WEIGHT: halves}
    edges = chain(schedule.num_stages)
    lines = simulate_plainly(schedule, edges, lambda action: float(table[action.op][action.stage]))
    expected = [[(span.start, span.end, str(span.action)) for span in line] for line in lines]
    assert [[(e.start, e.end, e.name) for e in row.events] for row in found.rows] == expected


def test_transfers_take_their_time_and_keep_their_channel() -> None:
    found = run(one_f_one_b(2, 1), Given(transfer_seconds=0.5))
    assert found.seconds == 1 + 0.5 + 1 + 2 + 0.5 + 2
    assert found.exposed == {"pp": 0.5}  # one wait on each of two ranks
    slow = run(SCHEDULES["gpipe"](2, 4), Given(transfer_seconds=3.0))
    starts = [event.start for event in slow.rows[1].events if event.kind == "F"]
    assert starts == [4.0, 7.0, 10.0, 13.0]  # the link, not the sender, sets the pace
    assert slow.rows[1].exposed["pp"] == pytest.approx(3 + 2 + 2 + 2)


def test_gradient_sums_follow_the_last_backward() -> None:
    schedule = one_f_one_b(3, 4)
    found = run(schedule, Given(reduction=5.0, placement=schedule.placement))
    assert found.seconds == 3 * 6 + 5
    assert [row.exposed for row in found.rows] == [{"dp": 5.0}] * 3
    assert found.rows[2].bubble == pytest.approx((found.seconds - 12 - 5) / found.seconds)


@pytest.mark.parametrize("rank", range(4))
def test_a_straggler_sets_the_pace_of_its_pipeline(rank: int) -> None:
    p, m, factor = 4, 12, 2.0
    found = run(one_f_one_b(p, m), setting=Setting(Mesh(pp=p), faults=Faults({rank: factor})))
    # it works all the time, but before the first values, after the last gradients, and until the first ones are back
    back = max(0.0, factor + 3 * (p - 1 - rank) - (p - rank) * factor)
    assert found.seconds == pytest.approx(3 * m * factor + 3 * rank + back)


def test_a_straggler_among_data_ranks_delays_the_sum_only() -> None:
    mesh = Mesh(dp=64, pp=2)
    schedule = one_f_one_b(2, 4)
    durations = Given(reduction=1.0, placement=schedule.placement)
    found = run(schedule, durations, Setting(mesh, faults=Faults({5: 3.0})))
    assert [(row.rank, row.count) for row in found.rows] == [(0, 63), (1, 63), (4, 1), (5, 1)]
    slow = 3 * (4 * 3 + 1)
    assert found.seconds == slow + 1  # the slow stage is the last: its first stage ends last
    quick = found.rank(0)
    assert quick.busy_seconds == 12 and max(e.end for e in quick.events if e.kind == "B") == 15
    assert next(e.start for e in quick.events if e.kind == "sum") == slow  # it waits for the slow one
    with pytest.raises(CompileError, match="QN201"):
        found.rank(7)


def test_ranks_in_lockstep_are_as_slow_as_the_slowest() -> None:
    for slow in range(4):
        setting = Setting(Mesh(tp=4), ("tp",), Faults({slow: 2.5}))
        found = run(one_f_one_b(1, 3), setting=setting)
        assert len(found.rows) == 1 and found.rows[0].count == 4 and found.seconds == 9 * 2.5


def test_a_slow_link_slows_its_transfers_or_its_sums() -> None:
    schedule = one_f_one_b(2, 1)
    durations = Given(transfer_seconds=1.0, reduction=1.0, placement=schedule.placement)
    mesh = Mesh(dp=2, pp=2)
    assert run(schedule, durations, Setting(mesh)).seconds == 6 + 2 + 1
    transfers = run(schedule, durations, Setting(mesh, faults=Faults(slow_links={(2, 3): 4.0})))
    assert transfers.seconds == 6 + 8 + 1
    sums = run(schedule, durations, Setting(mesh, faults=Faults(slow_links={(0, 2): 4.0})))
    assert sums.seconds == 6 + 2 + 4


@pytest.mark.parametrize(
    "faults",
    [Faults({9: 2.0}), Faults(slow_links={(0, 3): 2.0}), Faults(slow_links={(1, 1): 2.0}), Faults({0: -1.0})],
)
def test_faults_that_cannot_be(faults: Faults) -> None:
    with pytest.raises(CompileError, match="QN201"):
        run(one_f_one_b(2, 2), setting=Setting(Mesh(pp=2, dp=2), faults=faults))


def test_ranks_that_share_cores_slow_each_other_down() -> None:
    schedule = one_f_one_b(1, 3)
    assert run(schedule, Given(cores=2), Setting(Mesh(dp=4))).seconds == 18.0
    assert run(schedule, Given(cores=4), Setting(Mesh(dp=4))).seconds == 9.0
    # alone at first and last, together between: 3 seconds of each microbatch on each of two ranks
    assert run(one_f_one_b(2, 8), Given(cores=1)).seconds == pytest.approx(2 * 24)
    assert run(one_f_one_b(2, 8), Given(cores=2)).seconds == 27.0


def test_what_never_starts_is_named() -> None:
    parse = lambda text: tuple(map(Action.parse, text.split()))  # noqa: E731
    schedule = Schedule("stuck", 1, (0, 1), (parse("0RB0<1 0B0 0F0 0SF0>1"), parse("1RF0<0 1F0 1B0 1SB0>0")))
    with pytest.raises(ScheduleError, match="rank 0 at 0B0, rank 1 at 1F0"):
        simulate_schedule(schedule, chain(2), Given())


def test_thousands_of_ranks_are_a_few_rows_and_runs_are_alike() -> None:
    schedule = one_f_one_b(16, 64)
    setting = Setting(Mesh(dp=128, pp=16, tp=8), ("tp",), Faults({77: 1.5}, {(0, 8): 2.0}))
    durations = Given(transfer_seconds=0.1, reduction=1.0, placement=schedule.placement)
    first, again = (run(schedule, durations, setting) for _ in range(2))
    assert sum(row.count for row in first.rows) == 16384 and len(first.rows) == 32
    assert first.to_json() == again.to_json() and first.svg() == again.svg()


def test_a_send_is_over_only_when_its_reader_has_answered() -> None:
    for name, p, m in product(SCHEDULES, range(2, 5), range(1, 7)):
        schedule = SCHEDULES[name](p, m)
        schedule = with_transfers(schedule, chain(schedule.num_stages))
        for rank in range(p):
            found = arrived_sends(schedule, rank)
            sends = [send for many in found.values() for send in many]
            assert len(sends) == len(set(sends))
            if name == "1f1b":  # every value that is sent comes back as a gradient
                mine = [a for a in schedule.actions[rank] if a.op is Op.SEND_FORWARD]
                assert {a for a in sends if a.op is Op.SEND_FORWARD} == set(mine)


# -- reports


def test_reports_escape_what_users_named() -> None:
    evil = '"><script>alert(1)</script>&\x0b'
    event = Event(0.0, 1.0, "collective", evil, 0, -1, evil, 0.5)
    row = RankTimeline(0, {evil: 0}, 1, (Event(0.0, 2.0, "F", evil, 0, 0), event), 2.0, 0.0, {evil: 0.5})
    timeline = Timeline(evil, evil, 1, 1, 2.0, (row,), (evil,))
    for text in (timeline.svg(), timeline.html(), timeline._repr_html_()):
        assert "<script" not in text
    ElementTree.fromstring(timeline.svg())
    assert json.loads(timeline.to_json())["title"] == evil
    assert json.loads(timeline.chrome_trace())["traceEvents"]


def test_reports_agree() -> None:
    schedule = one_f_one_b(4, 8)
    found = run(schedule, Given(transfer_seconds=0.1, reduction=1.0, placement=schedule.placement))
    told = json.loads(found.to_json())
    assert told["seconds"] == found.seconds and told["bubble"] == found.bubble
    assert f"bubble {found.bubble:.1%}" in str(found)
    trace = json.loads(found.chrome_trace())["traceEvents"]
    boxes = [event for event in trace if event["ph"] == "X"]
    assert len(boxes) == sum(len(row.events) for row in found.rows)
    assert max(event["ts"] + event["dur"] for event in boxes) == pytest.approx(found.seconds * 1e6)
    picture = ElementTree.fromstring(found.svg())
    hovers = [element.text or "" for element in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert sum(text.startswith(("F", "B")) for text in hovers) == 4 * 16
