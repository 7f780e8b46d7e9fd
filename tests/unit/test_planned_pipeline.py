"""The planner's pipeline: its times are those of the schedule's own simulation, for any number of microbatches."""

from __future__ import annotations

import random

import pytest

from quintnet_compiler.planner.pipeline import StageWork, least_seconds, min_saved, pipeline
from quintnet_compiler.schedules.kinds import SCHEDULES
from quintnet_compiler.schedules.schedule import Op, chain, earliest_spans, most_held

KINDS = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1)]
KINDS += [("zb-v", 2), ("dualpipe-v", 2)]


def _stages(count: int, dice: random.Random, send: float) -> tuple[StageWork, ...]:
    work = [(dice.uniform(0.8, 1.2), dice.uniform(0.8, 1.2), dice.uniform(0.8, 1.2)) for _ in range(count)]
    return tuple(StageWork(*times, send if index else 0.0, dice.randrange(1, 9)) for index, times in enumerate(work))


@pytest.mark.parametrize(("name", "virtual"), KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_seconds_and_bytes_are_those_of_the_whole_schedule(name: str, virtual: int, ranks: int) -> None:
    dice = random.Random(f"{name} {ranks}")
    for microbatches in (ranks, 4 * ranks + 1, 9 * ranks + 3, 16 * ranks):
        stages = _stages(ranks * virtual, dice, 0.0)
        schedule = SCHEDULES[name](ranks, microbatches, virtual)
        times = {
            (index, op): seconds
            for index, one in enumerate(stages)
            for op, seconds in (
                (Op.FORWARD, one.forward),
                (Op.BACKWARD, one.backward + one.weight),
                (Op.BACKWARD_INPUT, one.backward),
                (Op.BACKWARD_WEIGHT, one.weight),
            )
        }
        lines = earliest_spans(schedule, chain(len(stages)), lambda action, t=times: t[action.stage, action.op])
        found = pipeline(name, ranks, microbatches, virtual, stages)
        whole = max(line[-1].end for line in lines)
        assert found.seconds == pytest.approx(whole, rel=5e-3 if microbatches > 4 * ranks else 1e-9)
        assert least_seconds(name, ranks, microbatches, stages) <= whole * (1 + 1e-9)
        assert found.saved == most_held(schedule, lambda stage, s=stages: s[stage].saved)
        assert max(min_saved(name, ranks, microbatches, stages)) <= max(found.saved)
        if name in ("gpipe", "1f1b", "zb-h1"):  # the others have several moments, of which one is taken
            assert max(min_saved(name, ranks, microbatches, stages)) == max(found.saved)


def test_sends_take_their_time_where_nothing_hides_them() -> None:
    stages = tuple(StageWork(1.0, 1.0, 1.0, 0.5 if index else 0.0, 1) for index in range(4))
    assert pipeline("gpipe", 4, 1, 1, stages).seconds == 4 * 3 + 2 * 3 * 0.5
    assert pipeline("1f1b", 4, 64, 1, stages).seconds < 64 * 3 + 3 * 3 + 2 * 3 * 0.5 + 64 * 2 * 0.5
