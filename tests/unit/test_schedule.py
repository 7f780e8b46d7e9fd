"""Schedules: generators against closed forms, lowering on random pipelines, the verifier on mutations."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import combinations, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quintnet_compiler.schedules.check import verify_schedule
from quintnet_compiler.schedules.grid import grid
from quintnet_compiler.schedules.kinds import (
    SCHEDULES,
    dual_pipe_v,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    zero_bubble_h1,
    zero_bubble_v,
)
from quintnet_compiler.schedules.schedule import (
    COMPUTE,
    DIRECTION,
    MAKES,
    RECEIVE,
    SEND,
    Action,
    Flow,
    Op,
    Schedule,
    ScheduleError,
    StageEdge,
    bubble,
    chain,
    earliest_spans,
    with_transfers,
)

SIZES = list(product(range(1, 7), range(1, 10)))


def parse(text: str) -> tuple[Action, ...]:
    return tuple(map(Action.parse, text.split()))


def breadth_first(placement: tuple[int, ...], num_microbatches: int) -> Schedule:
    """Several stages per rank: each rank runs its stages in turn, all microbatches of one before the next."""
    rows: list[list[Action]] = [[] for _ in range(1 + max(placement))]
    for op, stages in ((Op.FORWARD, range(len(placement))), (Op.BACKWARD, range(len(placement))[::-1])):
        for stage, microbatch in product(stages, range(num_microbatches)):
            rows[placement[stage]].append(Action(op, stage, microbatch))
    return Schedule("breadth first", num_microbatches, placement, tuple(map(tuple, rows)))


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Schedule, tuple[StageEdge, ...]]:
    """A schedule and edges that skip stages, some of them without gradients."""
    num_microbatches = draw(st.integers(1, 6))
    make = draw(st.sampled_from([*SCHEDULES.values(), None]))
    if make is None:
        num_ranks = draw(st.integers(1, 3))
        extra = draw(st.lists(st.integers(0, num_ranks - 1), max_size=4))
        schedule = breadth_first((*range(num_ranks), *extra), num_microbatches)
    else:
        schedule = make(draw(st.integers(1, 6)), num_microbatches)
    pairs = list(combinations(range(schedule.num_stages), 2))
    some = st.lists(st.sampled_from(pairs), unique=True, max_size=8) if pairs else st.just([])
    edges = tuple(StageEdge(source, target, draw(st.booleans())) for source, target in draw(some))
    return schedule, edges if draw(st.booleans()) else edges + chain(schedule.num_stages)


# ------------------------------------------------------------------------------------------------- generators


# For each schedule and number of stages per rank: the bubble, the microbatches from which on it is that, and the
# activations that are alive on a rank.
CLAIMS: dict[tuple[str, int], tuple[Callable[..., float], Callable[[int], int], Callable[..., int]]] = {
    ("gpipe", 1): (lambda p, m: (p - 1) / (m + p - 1), lambda p: 1, lambda p, m, r: m),
    ("1f1b", 1): (lambda p, m: (p - 1) / (m + p - 1), lambda p: 1, lambda p, m, r: min(m, p - r)),
    ("zb-h1", 1): (lambda p, m: (p - 1) / (3 * m + p - 1), lambda p: p, lambda p, m, r: min(m, p)),
    ("zb-v", 2): (lambda p, m: (p - 1) / (6 * m + p - 1), lambda p: 2 * p - 1, lambda p, m, r: min(2 * m, 2 * p)),
    ("dualpipe-v", 2): (lambda p, m: (p - 1) / (6 * m + p - 1), lambda p: 2 * p, lambda p, m, r: min(2 * m, 2 * p + 1)),
    **{
        ("gpipe", v): (lambda p, m, v=v: (p - 1) / (v * m + p - 1), lambda p: p, lambda p, m, r, v=v: v * m)
        for v in (2, 3)
    },
    **{
        ("interleaved", v): (
            lambda p, m, v=v: (p - 1) / (v * m + p - 1),
            lambda p: p,
            lambda p, m, r, v=v: min(v * m, (v - 1) * -(-m // max(1, m // p)) + 2 * (p - r) - 1),
        )
        for v in (2, 3, 4)
    },
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name, v", CLAIMS)
def test_every_generator_is_valid_and_has_the_known_bubble_and_memory(name: str, v: int) -> None:
    share, least, live = CLAIMS[name, v]
    for p, m in SIZES:
        schedule, edges = SCHEDULES[name](p, m, v), chain(p * v)
        assert (schedule.name, schedule.num_stages, schedule.num_ranks) == (name, p * v, p)
        peaks = verify_schedule(with_transfers(schedule, edges), edges, max_live=m * v)
        for rank, peak in enumerate(peaks):
            assert peak == live(p, m, rank) if m >= least(p) else peak <= live(p, m, rank)
        for hoist in (0, 2):
            lowered = with_transfers(schedule, edges, hoist=hoist)
            assert verify_schedule(lowered, edges, rendezvous=hoist == 0) == peaks
            assert bubble(lowered, edges) == bubble(schedule, edges)  # transfers take no simulated time
        if m >= least(p):
            assert bubble(schedule, edges) == pytest.approx(share(p, m))
        if name in ("gpipe", "1f1b", "interleaved") and m >= least(p):
            assert bubble(schedule, edges, forward=3, backward=0.5) == pytest.approx(share(p, m))


def test_every_schedule_has_claims() -> None:
    assert {name for name, _ in CLAIMS} == SCHEDULES.keys()


def test_zero_bubbles_are_a_third_of_1f1b_or_less() -> None:
    """Four ranks, eight microbatches, forward and both halves of a backward equally long: in idle seconds of a rank."""
    plain, h1, v = (make(4, 8) for make in (one_f_one_b, zero_bubble_h1, zero_bubble_v))
    idle = {}
    for schedule, unit in ((plain, 2.0), (h1, 2.0), (v, 1.0)):  # the V's stages are half as long
        lines = earliest_spans(
            schedule, chain(schedule.num_stages), lambda a, u=unit: u * (2 if a.op is Op.BACKWARD else 1)
        )
        assert {sum(span.end - span.start for span in line) for line in lines} == {48.0}
        idle[schedule.name] = max(line[-1].end for line in lines) - 48.0
    assert idle == {"1f1b": 18.0, "zb-h1": 6.0, "zb-v": 3.0}
    assert max(verify_schedule(with_transfers(h1, chain(4)), chain(4))) == 4  # as 1F1B's first rank
    assert max(verify_schedule(with_transfers(v, chain(8)), chain(8))) == 8  # of half the size


def _pairs(row: Sequence[Action], last: bool) -> list[tuple[Action, ...]]:
    """What DeepSeek runs as one: a forward and the whole backward that follows it; but for the last rank's first."""
    units: list[tuple[Action, ...]] = []
    for action in row:
        before = units[-1] if units else ()
        if action.op is Op.BACKWARD and [a.op for a in before] == [Op.FORWARD] and not last:
            units[-1] = (*before, action)
        else:
            last = last and action.op is not Op.BACKWARD
            units.append((action,))
    return units


@pytest.mark.parametrize("chunk, both", [(1, 2), (1, 2.5), (2, 5), (2, 6)])
def test_dualpipe_with_forward_and_backward_as_one_has_the_published_bubble(chunk: float, both: float) -> None:
    """The fullest rank waits (PP/2 - 1) (F&B + B - 3 W) for PP stages, says the README's table, and every rank holds
    PP + 1 chunks; PP is 2 p. F, and both halves of B, are ``chunk`` long, and F&B ``both``."""
    for p, more in product(range(1, 6), (0, 1, 5)):
        schedule, edges = dual_pipe_v(p, 2 * p + more), chain(2 * p)
        assert verify_schedule(with_transfers(schedule, edges), edges) == (2 * p + 1,) * p
        rows = [_pairs(row, rank == p - 1) for rank, row in enumerate(schedule.actions)]
        together = [sum(len(unit) == 2 for unit in row) for row in rows]
        assert together == [2 * more + p + rank + 1 - (rank == p - 1) for rank in range(p)]
        lengths = [[{2: both}.get(len(u), 2 * chunk if u[0].op is Op.BACKWARD else chunk) for u in row] for row in rows]
        end = _together(rows, lengths, Flow.from_edges(edges, 2 * p))
        assert end - min(map(sum, lengths)) == pytest.approx((p - 1) * (both + 2 * chunk - 3 * chunk))


def _together(rows: list[list[tuple[Action, ...]]], lengths: list[list[float]], flow: Flow) -> float:
    """When all is done, if several actions that run as one begin and end together."""
    made: dict[tuple[Op, int, int], float] = {}
    ends, at = [0.0] * len(rows), [0] * len(rows)
    while any(here < len(row) for here, row in zip(at, rows, strict=True)):
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                unit = row[at[rank]]
                needs = [(way, stage, a.microbatch) for a in unit for way, stage in flow.needs(a)]
                if not all(need in made for need in needs):
                    break
                ends[rank] = max(ends[rank], *(made[need] for need in needs), 0.0) + lengths[rank][at[rank]]
                made |= {(MAKES[a.op], a.stage, a.microbatch): ends[rank] for a in unit if a.op in MAKES}
                at[rank] += 1
    return max(ends)


@pytest.mark.parametrize(
    "name, wrong, right", [("1f1b", 2, 1), ("interleaved", 1, 2), ("zb-h1", 3, 1), ("zb-v", 1, 2), ("dualpipe-v", 3, 2)]
)
def test_numbers_of_stages_that_a_schedule_does_not_have(name: str, wrong: int, right: int) -> None:
    with pytest.raises(
        ScheduleError, match=rf"QN208(?s:.*){name} has .*, not {wrong}\n  fix: use virtual_stages={right}"
    ):
        SCHEDULES[name](2, 4, wrong)
    assert SCHEDULES[name](2, 4, right).num_stages == 2 * right


@pytest.mark.parametrize("placement", [(0,), (0, 1, 2), (0, 1, 0, 1), (0, 1, 2, 2, 1, 0), (0, 0)], ids=str)
def test_forwards_alone_never_wait_for_ever_and_overlap(placement: tuple[int, ...]) -> None:
    edges = (*chain(len(placement)), *([StageEdge(0, len(placement) - 1)] if len(placement) > 2 else []))
    for m in range(1, 9):
        lowered = with_transfers(forward_only(placement, m), edges)
        lines = earliest_spans(lowered, edges, lambda action: 1.0)
        assert sum(len(line) for line in lines) == len(placement) * m
        # from the first microbatch's arrival to the last one's, the busiest rank hardly waits
        v = len(placement) // (1 + max(placement))
        assert max(line[-1].end for line in lines) <= v * m + 2 * len(placement) - 2


def test_several_stages_on_a_rank() -> None:
    schedule = breadth_first((0, 1, 1, 0), 2)
    lowered = with_transfers(schedule, chain(4), hoist=0)
    assert verify_schedule(lowered, chain(4), rendezvous=True) == (4, 4)
    sends = {action for row in lowered.actions for action in row if action.op in SEND.values()}
    assert sends == {*parse("0SF0>1 0SF1>1 1SB0>0 1SB1>0 2SF0>3 2SF1>3 3SB0>2 3SB1>2")}
    assert grid(schedule).splitlines()[1:] == [
        "rank 0  0F0 0F1 .   .   3F0 3F1 3B0 3B1 .   .   0B0 0B1",
        "rank 1  .   1F0 1F1 2F0 2F1 .   .   2B0 2B1 1B0 1B1 .",
    ]


@pytest.mark.parametrize("p, m", [(0, 1), (1, 0), (-1, 2)])
def test_a_schedule_needs_stages_and_microbatches(p: int, m: int) -> None:
    for make in SCHEDULES.values():
        with pytest.raises(ScheduleError, match="QN208"):
            make(p, m)


# --------------------------------------------------------------------------------------------------- printing


def test_golden_grids() -> None:
    assert str(one_f_one_b(4, 6)) == (
        "1f1b: stages 4, microbatches 6, bubble 33.3%\n"
        "rank 0  F0 F1 F2 F3 .  .  .  B0 F4 B1 F5 B2 .  B3 .  B4 .  B5\n"
        "rank 1  .  F0 F1 F2 .  .  B0 F3 B1 F4 B2 F5 B3 .  B4 .  B5 .\n"
        "rank 2  .  .  F0 F1 .  B0 F2 B1 F3 B2 F4 B3 F5 B4 .  B5 .  .\n"
        "rank 3  .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 .  .  ."
    )
    assert grid(gpipe(2, 3), chain(2)) == (
        "gpipe: stages 2, microbatches 3, bubble 25.0%\nrank 0  F0 F1 F2 .  .  B0 B1 B2\nrank 1  .  F0 F1 F2 B0 B1 B2 ."
    )


def test_golden_lowering() -> None:
    plain = with_transfers(one_f_one_b(2, 3), chain(2), hoist=0).actions
    assert plain[0] == parse("0F0 0SF0>1 0F1 0SF1>1 0RB0<1 0B0 0F2 0RB1<1 0SF2>1 0B1 0RB2<1 0B2 0R")
    assert plain[1] == parse("1RF0<0 1F0 1RF1<0 1B0 1SB0>0 1F1 1B1 1SB1>0 1RF2<0 1F2 1B2 1SB2>0 1R")
    hoisted = with_transfers(one_f_one_b(2, 3), chain(2)).actions
    assert hoisted[0] == parse("0F0 0SF0>1 0RB0<1 0F1 0SF1>1 0B0 0RB1<1 0F2 0SF2>1 0RB2<1 0B1 0B2 0R")
    assert hoisted[1] == parse("1RF0<0 1RF1<0 1F0 1B0 1SB0>0 1F1 1RF2<0 1B1 1SB1>0 1F2 1B2 1SB2>0 1R")


def test_actions_print_and_parse() -> None:
    for schedule in (one_f_one_b(3, 12), zero_bubble_h1(3, 2)):
        for row in with_transfers(schedule, [*chain(3), StageEdge(0, 2)]).actions:
            assert parse(" ".join(map(str, row))) == row
    examples = "2F0 2B13 2I0 2W0 2SF0>3 3RF0<2 3SB0>2 2RB0<3 2R"
    assert " ".join(map(str, parse(examples))) == examples
    for text in ("", "F0", "2F", "2R0", "2F0>1", "2SF0", "2SF0<3", "3RF0>2", "02F0", "2F0 ", "2X0", "-1F0"):
        with pytest.raises(ScheduleError, match="QN208"):
            Action.parse(text)


# --------------------------------------------------------------------------------------------------- lowering


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(pipelines())
def test_random_edges_are_valid_with_every_hoisting(pipeline: tuple[Schedule, tuple[StageEdge, ...]]) -> None:
    schedule, edges = pipeline
    plain = with_transfers(schedule, edges, hoist=0)
    peaks = verify_schedule(plain, edges, rendezvous=True)
    for hoist in (1, 2):
        hoisted = with_transfers(schedule, edges, hoist=hoist)
        assert verify_schedule(hoisted, edges) == peaks
        for before, after in zip(plain.actions, hoisted.actions, strict=True):
            assert_hoisted(before, after, hoist)


def assert_hoisted(before: tuple[Action, ...], after: tuple[Action, ...], hoist: int) -> None:
    """Receives moved over at most ``hoist`` compute actions; all else, and each direction, is in order."""
    for op in RECEIVE.values():
        assert [a for a in before if a.op is op] == [a for a in after if a.op is op]
    receives = {a for a in before if a.op in RECEIVE.values()}
    assert [a for a in before if a not in receives] == [a for a in after if a not in receives]
    for action in receives:
        counts = [sum(a.op in COMPUTE for a in row[: row.index(action)]) for row in (before, after)]
        assert 0 <= counts[0] - counts[1] <= hoist


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_each_stage_reduces_as_soon_as_its_gradients_are_sent(name: str) -> None:
    schedule = with_transfers(SCHEDULES[name](3, 4), chain(3))
    assert [" ".join(map(str, row[-3:])) for row in schedule.actions] == [
        "0B2 0B3 0R",
        "1B3 1SB3>0 1R",
        "2B3 2SB3>1 2R",
    ]
    split = with_transfers(zero_bubble_h1(2, 2), chain(2), hoist=0).actions
    assert split[1][-4:] == parse("1SB1>0 1W0 1W1 1R")
    rows = with_transfers(breadth_first((0, 1, 0, 1), 2), chain(4)).actions
    assert parse("2SB1>1 2R") == rows[0][rows[0].index(Action(Op.REDUCE, 2)) - 1 :][:2]
    assert Action(Op.BACKWARD, 0, 0) in rows[0][rows[0].index(Action(Op.REDUCE, 2)) :]


def test_sending_after_and_receiving_before_use_deadlocks_when_transfers_block() -> None:
    schedule, flow = one_f_one_b(4, 8), Flow.from_edges(chain(4), 4)
    rows: list[tuple[Action, ...]] = []
    for row in schedule.actions:
        naive: list[Action] = []
        for action in row:
            way, stage, microbatch = MAKES[action.op], action.stage, action.microbatch
            naive += [Action(RECEIVE[way], stage, microbatch, peer) for peer in flow.incoming[way, stage]]
            naive += [action]
            naive += [Action(SEND[way], stage, microbatch, peer) for peer in flow.outgoing[way, stage]]
        rows.append((*naive, Action(Op.REDUCE, row[0].stage)))
    naive_schedule = replace(schedule, actions=tuple(rows))
    verify_schedule(naive_schedule, chain(4))
    with pytest.raises(ScheduleError, match=r"deadlock with transfers that block.*rank 0 waits at 0SF"):
        verify_schedule(naive_schedule, chain(4), rendezvous=True)


def test_lowering_takes_compute_actions_and_known_stages_only() -> None:
    lowered = with_transfers(gpipe(2, 1), chain(2))
    for bad in (
        lambda: with_transfers(lowered, chain(2)),
        lambda: with_transfers(gpipe(2, 1), chain(2), hoist=-1),
        lambda: with_transfers(gpipe(2, 1), chain(3)),
        lambda: with_transfers(Schedule("lost", 1, (0,), (parse("1F0"),)), []),
        lambda: StageEdge(1, 1),
        lambda: StageEdge(-1, 0),
        lambda: Schedule("lost", 1, (0, 1), ((),)),
    ):
        with pytest.raises(ScheduleError, match="QN208"):
            bad()


def test_simulation_names_what_never_starts() -> None:
    schedule = Schedule("stuck", 1, (0, 1), (parse("0B0 0F0"), parse("1F0 1B0")))
    with pytest.raises(ScheduleError, match=r"rank 0 at 0B0, rank 1 at 1F0(?s:.*)0  0B0  <-- here"):
        earliest_spans(schedule, chain(2), lambda action: 1.0)
    with pytest.raises(ScheduleError, match="takes no time"):
        bubble(gpipe(2, 1), chain(2), forward=0, backward=0)


# --------------------------------------------------------------------------------------------------- verifier

EDGES = (*chain(3), StageEdge(0, 2))

# Edits of 1f1b with 3 stages and 3 microbatches: the actions before, after, and what the verifier says.
MUTATIONS = {
    "drop a send": ("1SF1>2", "", r"rank 1: 1SF1>2 is missing\n(?s:.*)1F1  <-- here"),
    "drop a receive": ("2RF1<0", "", r"rank 2: 2RF1<0 is missing\n(?s:.*)2F1  <-- here"),
    "drop a gradient's send": ("2SB0>1", "", r"rank 2: 2SB0>1 is missing\n(?s:.*)2B0  <-- here"),
    "drop a gradient's receive": ("0RB2<2", "", r"rank 0: 0RB2<2 is missing\n(?s:.*)0B2  <-- here"),
    "swap receives of a channel": ("2RF0<1 2RF1<1", "2RF1<1 2RF0<1", "rank [12]: .* meets .* of rank [12]"),
    "swap sends of a channel": (
        "1SF1>2 1SF2>2",
        "1SF2>2 1SF1>2",
        "rank 1: 1SF2>2 comes before its value exists",
    ),
    "duplicate a forward": ("1F1", "1F1 1F1", r"rank 1: 1F1 is there twice\n"),
    "drop a reduction": ("2R", "", r"rank 2: 2R is missing\n(?s:.*)\(end\)  <-- here"),
    "duplicate a reduction": ("2R", "2R 2R", "rank 2: 2R is there twice"),
    "reduce too early": ("1B2 1R", "1R 1B2", "rank 1: 1R comes before 1B2 is over"),
    "backward before its forward": ("1F2 1B2", "1B2 1F2", "rank 1: 1B2 comes before the forward of stage 1"),
    "wrong peer": ("0SF0>1", "0SF0>2", "0SF0>2 is there twice"),
    "peer without an edge": ("1SF0>2", "1SF0>0", "rank 1: no stage or edge asks for 1SF0>0"),
    "unknown peer": ("2RF0<1", "2RF0<3", "rank 2: no stage or edge asks for 2RF0<3"),
    "missing microbatch": ("1F2", "", r"rank 1: 1F2 is missing"),
    "missing backward": ("0B1", "", r"rank 0: 0B1 is missing"),
    "one half of a backward": ("0B1", "0I1", "rank 0: 0W1 is missing"),
    "a whole and a half backward": ("0B1", "0B1 0I1", "no stage or edge asks for 0B1"),
    "another microbatch": ("1F2", "1F3", "1F3 has no such stage or microbatch"),
    "another rank's stage": ("1F2", "1F2 2F2", "rank 1: 2F2 belongs to rank 2"),
    "unknown stage": ("1F2", "1F2 7F2", "7F2 has no such stage or microbatch"),
    "use before the receive": ("2RF0<1 2F0", "2F0 2RF0<1", "rank 2: 2F0 comes before 2RF0<1"),
    "send before the forward": ("0F0 0SF0>1", "0SF0>1 0F0", "rank 0: 0SF0>1 comes before its value exists"),
    "gradient after its backward": ("0RB0<1 0B0", "0B0 0RB0<1", "rank 0: 0B0 comes before 0RB0<1"),
}


def mutate(schedule: Schedule, old: str, new: str) -> Schedule:
    """The slots of the actions ``old`` take the actions ``new``; the last one takes all that are left."""
    before, after = parse(old), list(parse(new))
    rank = schedule.placement[before[0].stage]
    slots = sorted(schedule.actions[rank].index(action) for action in before)
    row: list[Action] = []
    for slot, action in enumerate(schedule.actions[rank]):
        count = 1 if slot in slots[:-1] else len(after)
        row += [after.pop(0) for _ in range(count)] if slot in slots else [action]
    return replace(schedule, actions=(*schedule.actions[:rank], tuple(row), *schedule.actions[rank + 1 :]))


@pytest.mark.parametrize("hoist", [0, 1])
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_mutations_are_rejected(mutation: str, hoist: int) -> None:
    old, new, message = MUTATIONS[mutation]
    schedule = with_transfers(one_f_one_b(3, 3), EDGES, hoist=hoist)
    verify_schedule(schedule, EDGES)
    with pytest.raises(ScheduleError, match=message) as caught:
        verify_schedule(mutate(schedule, old, new), EDGES)
    assert isinstance(caught.value, ValueError) and "<-- here" in str(caught.value)


def test_the_weight_half_of_a_backward_comes_after_the_input_half() -> None:
    schedule = with_transfers(zero_bubble_h1(2, 2), chain(2))
    with pytest.raises(ScheduleError, match="rank 0: 0W1 comes before the backward of stage 0"):
        verify_schedule(mutate(schedule, "0I1 0W1", "0W1 0I1"), chain(2))


def test_every_single_drop_and_duplicate_is_rejected() -> None:
    schedule = with_transfers(one_f_one_b(3, 3), EDGES)
    for rank, row in enumerate(schedule.actions):
        for action in map(str, row):
            for new, problem in (("", "missing"), (f"{action} {action}", "there twice")):
                with pytest.raises(ScheduleError, match=f"rank {rank}: {action} is {problem}"):
                    verify_schedule(mutate(schedule, action, new), EDGES)


def test_the_limit_of_live_activations() -> None:
    schedule = with_transfers(gpipe(2, 3), chain(2))
    assert verify_schedule(schedule, chain(2), max_live=3) == (3, 3)
    message = r"rank 0: 0F2 makes 3 activations live; the limit is 2\n(?s:.*)0F2  <-- here"
    with pytest.raises(ScheduleError, match=message):
        verify_schedule(schedule, chain(2), max_live=2)


def test_a_deadlock_names_every_rank_that_waits() -> None:
    # Rank 0 wants the first gradient before it sends the second value; rank 1 wants it the other way round.
    rows = (
        parse("0F0 0SF0>1 0RB0<1 0B0 0F1 0SF1>1 0RB1<1 0B1 0R"),
        parse("1RF0<0 1RF1<0 1F0 1F1 1B0 1SB0>0 1B1 1SB1>0 1R"),
    )
    with pytest.raises(ScheduleError, match=r"deadlock with one channel.*rank 0 waits at 0B0, rank 1 waits at 1F1"):
        verify_schedule(Schedule("by hand", 2, (0, 1), rows), chain(2))


def test_the_edges_of_a_schedule_are_checked_too() -> None:
    schedule = with_transfers(one_f_one_b(3, 2), chain(3))
    with pytest.raises(ScheduleError, match="0SF0>2 is missing"):
        verify_schedule(schedule, EDGES)
    with pytest.raises(ScheduleError, match="no stage or edge asks for 1RB0<2"):
        verify_schedule(schedule, [StageEdge(0, 1), StageEdge(1, 2, backward=False)])


def test_an_error_shows_the_place() -> None:
    schedule = with_transfers(gpipe(2, 1), chain(2), hoist=0)
    with pytest.raises(ScheduleError) as caught:
        verify_schedule(mutate(schedule, "1RF0<0 1F0", "1F0 1RF0<0"), chain(2))
    assert str(caught.value) == (
        "QN208 the schedule is not valid\n"
        "  rank 1: 1F0 comes before 1RF0<0\n"
        "  rank 1:\n"
        "       0  1F0  <-- here\n"
        "       1  1RF0<0\n"
        "       2  1B0"
    )


def oracle(schedule: Schedule, edges: tuple[StageEdge, ...], *, rendezvous: bool) -> bool:
    """Is a permutation of a valid schedule valid? Decided otherwise: "happens after" must have no cycle.

    A transfer that blocks is one node that both ranks share. One that does not is a post on either side, and
    an arrival after both that the compute action waits for; then the posts of a channel must pair in order.
    """
    flow, after = Flow.from_edges(edges, schedule.num_stages), defaultdict[object, set[object]](set)
    posts: defaultdict[object, dict[bool, list[object]]] = defaultdict(lambda: {True: [], False: []})
    for rank, row in enumerate(schedule.actions):

        def done(way: Op, stage: int, microbatch: int, so_far: tuple[Action, ...]) -> bool:
            return any(Action(op, stage, microbatch) in so_far for op, made in MAKES.items() if made is way)

        nodes: list[object] = []
        for index, action in enumerate(row):
            so_far, stage, microbatch = row[:index], action.stage, action.microbatch
            nodes.append(action)
            if action.op in DIRECTION:
                way, sends = DIRECTION[action.op], action.op in SEND.values()
                if sends and not done(way, stage, microbatch, so_far):
                    return False
                transfer, channel = (
                    frozenset({action, action.partner}),
                    (rank, schedule.placement[action.peer]),
                )
                posts[channel if sends else channel[::-1], way][sends].append(transfer)
                if rendezvous:
                    nodes[-1] = transfer
                else:
                    after[transfer].add(action)
            elif action.op in COMPUTE:
                for way, source in flow.needs(action):
                    receive = Action(RECEIVE[way], stage, microbatch, source)
                    if receive in so_far:
                        after[action].add(frozenset({receive, receive.partner}))
                    elif schedule.placement[source] != rank or not done(way, source, microbatch, so_far):
                        return False
            elif any(later.stage == stage and later.op in COMPUTE for later in row[index:]):
                return False
        for first, second in pairwise(nodes):
            after[second].add(first)
    if not rendezvous and any(sides[True] != sides[False] for sides in posts.values()):
        return False
    try:
        TopologicalSorter(after).prepare()
    except CycleError:
        return False
    return True


@pytest.mark.parametrize("rendezvous", [False, True])
def test_shuffled_schedules_agree_with_the_oracle(rendezvous: bool) -> None:
    rng = random.Random(7)
    makers: list[Callable[[], Schedule]] = [
        lambda: one_f_one_b(3, 3),
        lambda: gpipe(2, 4),
        lambda: breadth_first((0, 1, 1, 0), 2),
        lambda: interleaved(2, 3),
        lambda: zero_bubble_h1(3, 3),
        lambda: zero_bubble_v(2, 2),
        lambda: dual_pipe_v(2, 4),
    ]
    verdicts = []
    for _ in range(400):
        schedule = rng.choice(makers)()
        edges = tuple({*chain(schedule.num_stages), *rng.choice([[], [StageEdge(0, schedule.num_stages - 1)]])})
        schedule = with_transfers(schedule, edges, hoist=0 if rendezvous else rng.randrange(3))
        rows = [list(row) for row in schedule.actions]
        for _ in range(rng.choice([1, 1, 2, 3])):
            row = rng.choice(rows)
            one = rng.randrange(len(row))
            other = min(len(row) - 1, one + rng.choice([1, 1, 2, 4]))
            row[one], row[other] = row[other], row[one]
        shuffled = replace(schedule, actions=tuple(map(tuple, rows)))
        try:
            verify_schedule(shuffled, edges, rendezvous=rendezvous)
            verdicts.append(True)
        except ScheduleError:
            verdicts.append(False)
        # The verifier wants channels in order in both modes.
        expected = oracle(shuffled, edges, rendezvous=False)
        assert verdicts[-1] == (expected and (not rendezvous or oracle(shuffled, edges, rendezvous=True)))
    assert 60 < sum(verdicts) < 340
