"""Time and memory of a pipeline, from the times of its stages and the order of a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..passes.stages.step_clock import StepClock
from ..schedules.kinds import SCHEDULES
from ..schedules.schedule import Op, Schedule, chain, earliest_spans, most_held
from ..schedules.synthesis import SYNTHESIZED, StageTimes, schedule_of
from .layouts import UNSPLIT

V_SHAPED = ("zb-v", "dualpipe-v")


@dataclass(frozen=True)
class StageWork:
    """The work of one microbatch on one stage.

    Attributes:
        forward: seconds.
        backward: seconds of the half that the previous stage waits for.
        weight: seconds of the half for parameters.
        send: seconds of sending the stage's input between two ranks.
        saved: bytes of the forward that the backward reads.
    """

    forward: float
    backward: float
    weight: float
    send: float
    saved: int

    @property
    def seconds(self) -> float:
        """Return seconds of forward and backward."""
        return self.forward + self.backward + self.weight


@dataclass(frozen=True)
class Pipeline:
    """The run of a schedule.

    Attributes:
        seconds: from the first forward to the last backward.
        saved: the most bytes that each rank holds for backwards.
        placement: the rank of each stage.
    """

    seconds: float
    saved: tuple[int, ...]
    placement: tuple[int, ...]


@lru_cache(256)
def pipeline(
    name: str, ranks: int, microbatches: int, virtual_stages: int, stages: tuple[StageWork, ...],
    placement: tuple[int, ...] | None = None,
) -> Pipeline:  # fmt: skip
    """Run the schedule ``name``: each action as soon as its rank is free and its values are there.

    Beyond a few times the depth the order repeats every ``ranks`` microbatches. For each such round the time of the
    last one is added, or of the busiest rank's work: at most half a percent from the exact time. All microbatches run
    where rounds have unequal length, or the order is synthesised. ``placement``: of a synthesised order; None: any.
    Results are cached, as layouts that differ only in how they store parameters have the same pipeline.

    Raises:
        ScheduleError: QN208 for a number of stages per rank that the schedule does not have.
    """

    def times() -> list[StageTimes]:
        return [StageTimes(stage.forward, stage.backward, stage.weight) for stage in stages]

    def first_microbatches(count: int) -> tuple[float, tuple[int, ...], Schedule]:
        if name == SYNTHESIZED:
            schedule = schedule_of(name, ranks, count, virtual_stages, times, placement)
        else:
            schedule = _schedule(name, ranks, count, virtual_stages)
        return *_run(schedule, stages), schedule

    simulated = _simulated_microbatches(name, ranks, microbatches, virtual_stages)
    if simulated == microbatches:
        seconds, saved, schedule = first_microbatches(microbatches)
        return Pipeline(seconds, saved, schedule.placement)
    seconds, saved, schedule = first_microbatches(simulated)
    longer, more_saved, _ = first_microbatches(simulated + ranks)
    rounds = (microbatches - simulated) // ranks
    saved = tuple(a + rounds * (b - a) for a, b in zip(saved, more_saved, strict=True))
    busy = [0.0] * ranks
    for stage, rank in zip(stages, schedule.placement, strict=True):
        busy[rank] += ranks * stage.seconds
    return Pipeline(seconds + rounds * max(longer - seconds, *busy), saved, schedule.placement)


def _simulated_microbatches(name: str, ranks: int, microbatches: int, virtual_stages: int) -> int:
    """Return the number of microbatches that run before rounds are added; all where there are no rounds."""
    simulated = 3 * ranks + microbatches % ranks
    uneven = name == SYNTHESIZED or (virtual_stages > 1 and microbatches % ranks)
    return microbatches if microbatches <= simulated + ranks or uneven else simulated


def actions_run(name: str, ranks: int, microbatches: int, virtual_stages: int) -> int:
    """Return about how many actions :func:`pipeline` runs."""
    simulated = _simulated_microbatches(name, ranks, microbatches, virtual_stages)
    total = simulated if simulated == microbatches else 2 * simulated + ranks
    return total * ranks * virtual_stages * (2 if name in UNSPLIT else 3)


@lru_cache(16)
def clock(name: str, ranks: int, microbatches: int, virtual_stages: int) -> StepClock:
    """Return a clock that times many cuts at once, with enough microbatches to rank them.

    Synthesised orders are timed as 1F1B.
    """
    name = name if name != SYNTHESIZED else "1f1b" if virtual_stages == 1 else "interleaved"
    simulated = _simulated_microbatches(name, ranks, microbatches, virtual_stages)
    return StepClock(_schedule(name, ranks, simulated, virtual_stages))


@lru_cache(16)
def most_at_once(name: str, ranks: int, microbatches: int, virtual_stages: int) -> tuple[int, ...]:
    """Return the most microbatches that each stage holds at once."""
    simulated = microbatches
    if name != "gpipe":
        simulated = _simulated_microbatches(name, ranks, microbatches, virtual_stages)
    name = name if name != SYNTHESIZED else "1f1b" if virtual_stages == 1 else "interleaved"
    schedule = _schedule(name, ranks, simulated, virtual_stages)
    return tuple(
        most_held(schedule, lambda other, stage=stage: int(other == stage))[home]  # type: ignore[misc]
        for stage, home in enumerate(schedule.placement)
    )


@lru_cache(16)
def _schedule(name: str, ranks: int, microbatches: int, virtual_stages: int) -> Schedule:
    """Return a schedule; cached, as consecutive layouts of a search have the same."""
    return SCHEDULES[name](ranks, microbatches, virtual_stages)


def least_seconds(name: str, ranks: int, microbatches: int, stages: Sequence[StageWork]) -> float:
    """Return a lower bound of any order: a rank's work, after the first microbatch passed the previous ranks."""
    least, arrival = 0.0, 0.0
    for rank, first in enumerate(stages[:ranks]):
        rank_stages = [first, stages[-1 - rank]] if name in V_SHAPED else stages[rank::ranks]
        least = max(least, microbatches * sum(stage.seconds for stage in rank_stages) + arrival)
        arrival += first.seconds if name in UNSPLIT else first.forward
    return least


def min_saved(name: str, ranks: int, microbatches: int, stages: Sequence[StageWork]) -> list[int]:
    """Return the fewest bytes that each rank holds at its peak."""

    def microbatches_at_once(rank: int) -> Iterator[tuple[int, int]]:
        """Yield stages of a rank, and how many microbatches of each it holds at once."""
        if name in V_SHAPED:  # after a microbatch turns, as many more follow on the way to the end
            yield from ((rank, 2 * ranks - 1 - rank), (-1 - rank, rank + 1))
        elif name == "interleaved":
            remaining = 2 * (ranks - rank - 1) + len(stages) - ranks + 1  # Narayanan et al. 2021
            for stage in reversed(range(rank + ranks, len(stages), ranks)):
                count = min(ranks, max(0, remaining - stage // ranks * ranks))
                remaining -= count
                yield stage, count
            yield rank, remaining
        else:
            counts = {"gpipe": microbatches, "zb-h1": ranks, SYNTHESIZED: 1}
            yield from ((stage, counts.get(name, ranks - rank)) for stage in range(rank, len(stages), ranks))

    return [
        sum(min(count, microbatches) * stages[stage].saved for stage, count in microbatches_at_once(rank))
        for rank in range(ranks)
    ]


def _run(schedule: Schedule, stages: Sequence[StageWork]) -> tuple[float, tuple[int, ...]]:
    """Return when the last action ends, and the most bytes that each rank holds."""
    times = {
        (index, op): seconds
        for index, work in enumerate(stages)
        for op, seconds in (
            (Op.FORWARD, work.forward),
            (Op.BACKWARD, work.backward + work.weight),
            (Op.BACKWARD_INPUT, work.backward),
            (Op.BACKWARD_WEIGHT, work.weight),
        )
    }
    lines = earliest_spans(
        schedule,
        chain(len(stages)),
        lambda action: times[action.stage, action.op],
        lambda source, target: stages[max(source, target)].send,
    )
    return max(line[-1].end for line in lines), most_held(schedule, lambda stage: stages[stage].saved)
