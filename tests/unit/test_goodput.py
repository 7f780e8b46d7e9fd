"""The checkpoint interval's closed forms, and the simulation of a run's events, which shares nothing with them."""

from __future__ import annotations

import math
import random
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.cost_models.checkpoint_interval import daly_interval, expected_goodput

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from goodput import FEATURES, Run, made, simulate

HOUR = 3600.0
RUN = Run(5 * HOUR, math.inf, interval=1500.0, save=60.0, stall=60.0, restart=600.0, heeds=False)


def test_the_optimum_is_youngs_to_first_order_and_the_least_of_the_exact_form() -> None:
    assert daly_interval(1e-3, 1e6) == pytest.approx(math.sqrt(2e3), rel=1e-3)  # Young
    for save in (1.0, 60.0, 600.0):
        best = daly_interval(save, 5 * HOUR)
        there = expected_goodput(best, save, 300.0, 5 * HOUR)
        exact = max(expected_goodput(best * (0.5 + i / 1000), save, 300.0, 5 * HOUR) for i in range(1000))
        assert exact * (1 - 1e-5) < there <= exact
    assert daly_interval(100.0, 50.0) == 50.0  # saves take longer than the run lives
    for save, mean in ((0.0, 1.0), (1.0, 0.0), (1.0, math.inf)):
        with pytest.raises(CompileError, match="mean time between failures"):
            daly_interval(save, mean)


@pytest.mark.parametrize("interval", [300.0, 1430.0, 6000.0])
def test_the_simulation_agrees_with_the_closed_form(interval: float) -> None:
    run, seconds = replace(RUN, interval=interval), 30 * 24 * HOUR
    found = [simulate(run, seconds, random.Random(seed)) for seed in range(60)]
    assert all(
        one["kept"] + one["lost"] + one["stalled"] + one["restarting"] == pytest.approx(seconds) for one in found
    )
    shares = [one["kept"] / seconds for one in found]
    error = statistics.stdev(shares) / math.sqrt(len(shares))
    assert abs(statistics.fmean(shares) - expected_goodput(interval, 60.0, 600.0, 5 * HOUR)) < 3.5 * error < 0.01


def test_without_faults_only_saves_cost_time() -> None:
    found = simulate(replace(RUN, between_failures=math.inf), 15600.0, random.Random(0))
    assert found == {"kept": 15000.0, "lost": 0.0, "stalled": 600.0}
    found = simulate(replace(RUN, between_failures=math.inf, stall=3.0), 15030.0, random.Random(0))
    assert found["stalled"] == 30.0


def test_a_notice_that_is_heeded_loses_nothing() -> None:
    warned = replace(RUN, between_failures=math.inf, between_notices=2 * HOUR)
    heeding = replace(warned, heeds=True)
    seconds = 30 * 24 * HOUR
    assert simulate(warned, seconds, random.Random(1))["lost"] > 100 * 600
    assert simulate(heeding, seconds, random.Random(1))["lost"] == 0.0


def test_an_asynchronous_save_protects_only_once_it_is_on_the_disk() -> None:
    """A fault 30 s after a save of 60 s that stalls for 3: the save before counts."""

    class Once(random.Random):
        def expovariate(self, lambd: float = 1.0) -> float:
            if hasattr(self, "given"):
                return math.inf
            self.given = True
            return 3036.0

    run = replace(RUN, stall=3.0)
    found = simulate(run, 10_000.0, Once())  # saves began at 1500 and 3003
    assert found["lost"] == pytest.approx(3036.0 - 3.0 - 3.0 - 1500.0) and found["restarting"] == 600.0
    found = simulate(replace(run, stall=60.0), 10_000.0, Once())  # the next would be at 3060
    assert found["lost"] == pytest.approx(3036.0 - 60.0 - 1500.0)


def test_features_are_put_on_one_by_one() -> None:
    everything = made(replace(RUN, between_notices=24 * HOUR), FEATURES, quick=100.0)
    assert (everything.heeds, everything.stall, everything.restart) == (True, 3.0, 100.0)
    assert everything.interval == daly_interval(3.0, 5 * HOUR)
    only = made(replace(RUN, between_notices=5 * HOUR), ("interval",), quick=100.0)
    assert only.interval == daly_interval(60.0, 2.5 * HOUR) and only.stall == only.save
