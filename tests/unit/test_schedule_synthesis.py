"""Synthesised schedules: valid, within their memory, deterministic, and never slower than any that has a name."""

from __future__ import annotations

import random

import pytest

from quintnet_compiler.schedules.check import verify_schedule
from quintnet_compiler.schedules.kinds import SCHEDULES
from quintnet_compiler.schedules.schedule import ScheduleError, chain, with_transfers
from quintnet_compiler.schedules.synthesis import StageTimes, makespan, synthesized


def _uneven(dice: random.Random, count: int) -> list[StageTimes]:
    return [StageTimes(dice.uniform(0.5, 2), dice.uniform(0.5, 2), dice.uniform(0.3, 1.5)) for _ in range(count)]


@pytest.mark.parametrize("seed", range(30))
def test_no_named_schedule_is_faster_in_the_same_memory(seed: int) -> None:
    dice = random.Random(seed)
    p, v, m = dice.choice([2, 3, 4, 6]), dice.choice([1, 2, 3]), dice.choice([2, 4, 6, 8])
    times, edges, limit = _uneven(dice, p * v), chain(p * v), dice.choice([p * v, p * v + 2, 2 * p * v])
    named = []
    for make in SCHEDULES.values():
        try:
            one = make(p, m, v)
        except ScheduleError:
            continue
        if max(verify_schedule(with_transfers(one, edges), edges)) <= limit:
            named.append(makespan(one, times))
    found = synthesized(times, p, m, max_live=limit)
    verify_schedule(with_transfers(found, edges), edges, max_live=limit)
    assert all(makespan(found, times) <= other for other in named)
    busiest = max(
        m
        * sum(
            times[s].forward + times[s].input + times[s].weight for s, home in enumerate(found.placement) if home == r
        )
        for r in range(p)
    )
    assert makespan(found, times) >= busiest * (1 - 1e-12)
    assert synthesized(times, p, m, max_live=limit) == found


def test_uneven_stages_gain() -> None:
    """By more than a percent on average over the vectors for which there is a named schedule at all."""
    shares = []
    for seed in range(30):
        dice = random.Random(seed)
        p, m = dice.choice([3, 4, 6]), dice.choice([4, 8])
        times = _uneven(dice, 2 * p)
        best = min(makespan(SCHEDULES[name](p, m, 2), times) for name in ("zb-v", "interleaved", "gpipe"))
        shares.append(makespan(synthesized(times, p, m), times) / best)
    assert sum(shares) / len(shares) < 0.97


def test_even_stages_are_the_zero_bubble_schedule() -> None:
    for p, m in ((2, 4), (4, 8)):
        found = synthesized([StageTimes(1, 1, 1)] * (2 * p), p, m, max_live=2 * p)
        assert makespan(found, [StageTimes(1, 1, 1)] * (2 * p)) == 6 * m + p - 1


@pytest.mark.parametrize("v", [1, 2, 3])
def test_the_least_memory_is_one_microbatch(v: int) -> None:
    times = _uneven(random.Random(v), 3 * v)
    found = synthesized(times, 3, 4, max_live=v)
    assert verify_schedule(with_transfers(found, chain(3 * v)), chain(3 * v), max_live=v) == (v,) * 3
    with pytest.raises(ScheduleError, match=rf"QN208(?s:.*)holds {v - 1} activations or fewer\n  fix: allow {v}"):
        synthesized(times, 3, 4, max_live=v - 1)
    with pytest.raises(ScheduleError, match=r"QN208(?s:.*)cannot be spread evenly over 3 ranks"):
        synthesized([*times, StageTimes(1, 1, 1)], 3, 4)
