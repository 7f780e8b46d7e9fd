"""How long a pipeline takes and what its ranks hold, from the times of its stages and the order of a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..passes.stages.step_clock import StepClock
from ..schedules.kinds import SCHEDULES
from ..schedules.schedule import Op, Schedule, chain, most_held, simulate
from ..schedules.synthesis import SYNTHESIZED, StageTimes, schedule_of
from .layouts import UNSPLIT

V_SHAPED = ("zb-v", "dualpipe-v")


@dataclass(frozen=True)
class StageWork:
    """One microbatch on one stage. Seconds of its forward, of the half of its backward that the stage before it waits
    for, of the ``weight`` half, and of the way of its input between two ranks (``send``); bytes ``saved`` by the
    forward for the backward."""

    forward: float
    backward: float
    weight: float
    send: float
    saved: int

    @property
    def seconds(self) -> float:
        return self.forward + self.backward + self.weight


@dataclass(frozen=True)
class Pipeline:
    """``seconds`` from the first forward to the last backward; ``saved``: bytes on each rank, at most; ``placement``:
    the rank of each stage."""

    seconds: float
    saved: tuple[int, ...]
    placement: tuple[int, ...]


@lru_cache(256)
def pipeline(
    name: str, ranks: int, microbatches: int, virtual_stages: int, stages: tuple[StageWork, ...],
    placement: tuple[int, ...] | None = None,
) -> Pipeline:  # fmt: skip
    """Run the schedule ``name``: each action as soon as its rank is free and its values are there.

    Beyond a few times the depth the order repeats every ``ranks`` microbatches, and for each such round the time of the
    last is added, or of the busiest rank's work: half a percent from the truth at most (but where several stages of a
    rank have rounds of unequal length, or the order is a synthesised one, there is no round to add).
    ``placement``: of a synthesised order; None: any. Layouts that differ only in how they store parameters have the
    same pipeline, which is run once.

    Raises:
        ScheduleError: QN208 for a number of stages per rank that the schedule does not have.
    """

    def times() -> list[StageTimes]:
        return [StageTimes(stage.forward, stage.backward, stage.weight) for stage in stages]

    def of(count: int) -> tuple[float, tuple[int, ...], Schedule]:
        if name == SYNTHESIZED:
            schedule = schedule_of(name, ranks, count, virtual_stages, times, placement)
        else:
            schedule = _named(name, ranks, count, virtual_stages)
        return *_run(schedule, stages), schedule

    enough = _enough(name, ranks, microbatches, virtual_stages)
    if enough == microbatches:
        seconds, saved, schedule = of(microbatches)
        return Pipeline(seconds, saved, schedule.placement)
    (before, held, schedule), (after, more, _) = of(enough), of(enough + ranks)
    rounds = (microbatches - enough) // ranks
    saved = tuple(a + rounds * (b - a) for a, b in zip(held, more, strict=True))
    busy = [0.0] * ranks
    for stage, rank in zip(stages, schedule.placement, strict=True):
        busy[rank] += ranks * stage.seconds
    return Pipeline(before + rounds * max(after - before, *busy), saved, schedule.placement)


def _enough(name: str, ranks: int, microbatches: int, virtual_stages: int) -> int:
    """How many microbatches are run before rounds are added; all where there are no rounds."""
    enough = 3 * ranks + microbatches % ranks
    uneven = name == SYNTHESIZED or (virtual_stages > 1 and microbatches % ranks)
    return microbatches if microbatches <= enough + ranks or uneven else enough


def actions_run(name: str, ranks: int, microbatches: int, virtual_stages: int) -> int:
    """About how many actions :func:`pipeline` runs."""
    enough = _enough(name, ranks, microbatches, virtual_stages)
    often = enough if enough == microbatches else 2 * enough + ranks
    return often * ranks * virtual_stages * (2 if name in UNSPLIT else 3)


@lru_cache(16)
def clock(name: str, ranks: int, microbatches: int, virtual_stages: int) -> StepClock:
    """Times many cuts at once, of as many microbatches as show which is the fastest; synthesised orders as 1F1B's."""
    name = name if name != SYNTHESIZED else "1f1b" if virtual_stages == 1 else "interleaved"
    return StepClock(_named(name, ranks, _enough(name, ranks, microbatches, virtual_stages), virtual_stages))


@lru_cache(16)
def most_at_once(name: str, ranks: int, microbatches: int, virtual_stages: int) -> tuple[int, ...]:
    """How many microbatches each stage holds at most."""
    few = microbatches if name == "gpipe" else _enough(name, ranks, microbatches, virtual_stages)
    name = name if name != SYNTHESIZED else "1f1b" if virtual_stages == 1 else "interleaved"
    schedule = _named(name, ranks, few, virtual_stages)
    homes = schedule.placement
    return tuple(
        most_held(schedule, lambda one, stage=stage: int(one == stage))[home]  # type: ignore[misc]
        for stage, home in enumerate(homes)
    )


@lru_cache(16)
def _named(name: str, ranks: int, microbatches: int, virtual_stages: int) -> Schedule:
    """Layouts that follow each other in a search have the same order."""
    return SCHEDULES[name](ranks, microbatches, virtual_stages)


def least_seconds(name: str, ranks: int, microbatches: int, stages: Sequence[StageWork]) -> float:
    """What no order undercuts: a rank's own work, after the first microbatch came to it through those before."""
    split, found, before = name not in UNSPLIT, 0.0, 0.0
    for rank, first in enumerate(stages[:ranks]):
        mine = [first, stages[-1 - rank]] if name in V_SHAPED else stages[rank::ranks]
        found = max(found, microbatches * sum(stage.seconds for stage in mine) + before)
        before += first.forward if split else first.seconds
    return found


def min_saved(name: str, ranks: int, microbatches: int, stages: Sequence[StageWork]) -> list[int]:
    """Bytes that each rank holds at least."""

    def held(rank: int) -> Iterator[tuple[int, int]]:
        """Stages, and how many microbatches of each are on the rank at once."""
        if name in V_SHAPED:  # from where a microbatch turns there are as many more on the way to the end
            yield from ((rank, 2 * ranks - 1 - rank), (-1 - rank, rank + 1))
        elif name == "interleaved":
            left = 2 * (ranks - rank - 1) + len(stages) - ranks + 1  # Narayanan et al. 2021
            for stage in reversed(range(rank + ranks, len(stages), ranks)):
                count = min(ranks, max(0, left - stage // ranks * ranks))
                left -= count
                yield stage, count
            yield rank, left
        else:
            most = {"gpipe": microbatches, "zb-h1": ranks, SYNTHESIZED: 1}
            yield from ((stage, most.get(name, ranks - rank)) for stage in range(rank, len(stages), ranks))

    return [sum(min(count, microbatches) * stages[stage].saved for stage, count in held(rank)) for rank in range(ranks)]


def _run(schedule: Schedule, stages: Sequence[StageWork]) -> tuple[float, tuple[int, ...]]:
    """When the last action ends, and what each rank holds at most."""
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
    lines = simulate(
        schedule,
        chain(len(stages)),
        lambda action: times[action.stage, action.op],
        lambda source, target: stages[max(source, target)].send,
    )
    return max(line[-1].end for line in lines), most_held(schedule, lambda stage: stages[stage].saved)
