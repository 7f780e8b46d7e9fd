"""A schedule for stages that are not alike: found for their times, under a limit on memory."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .kinds import SCHEDULES, looped, there_and_back
from .schedule import RELEASES, Action, Op, Schedule, ScheduleError, chain, earliest_spans, most_held

SYNTHESIZED = "synthesized"
"""The name that plans give to a schedule made for the model's own stages."""

HALVES = (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


@dataclass(frozen=True)
class StageTimes:
    """Times of one microbatch of a stage, in any one unit: its forward, and both halves of its backward."""

    forward: float
    input: float
    weight: float

    def time_of(self, op: Op) -> float:
        """Return the time of an operation."""
        table = {Op.FORWARD: self.forward, Op.BACKWARD_INPUT: self.input, Op.BACKWARD_WEIGHT: self.weight}
        return table.get(op, self.input + self.weight)


def check_schedule(name: str, virtual_stages: int | None) -> None:
    """Require the name of a schedule; ``virtual_stages``: None if they are still open.

    Raises:
        ScheduleError: QN208 for an unknown schedule, or a number of stages per rank that it does not have.
    """
    if name not in SCHEDULES and name != SYNTHESIZED:
        names = ", ".join(sorted([*SCHEDULES, SYNTHESIZED]))
        raise ScheduleError("QN208", f"unknown schedule {name!r}", fix=f"use one of {names}")
    if name in SCHEDULES and virtual_stages is not None:
        SCHEDULES[name](1, 1, virtual_stages)


def schedule_of(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    virtual_stages: int,
    times: Callable[[], Sequence[StageTimes]],
    placement: tuple[int, ...] | None = None,
) -> Schedule:
    """Return the schedule of a plan's name; a synthesized one holds no more activations than 1F1B does.

    ``times``: of all stages, called if they are needed. ``placement``: the rank of each stage, if it is settled.
    """
    if name != SYNTHESIZED:
        return SCHEDULES[name](num_ranks, num_microbatches, virtual_stages)
    limit = num_ranks * virtual_stages
    return synthesized(times(), num_ranks, num_microbatches, max_live=limit, placement=placement)


def synthesized(
    times: Sequence[StageTimes],
    num_ranks: int,
    num_microbatches: int,
    *,
    max_live: int | None = None,
    placement: tuple[int, ...] | None = None,
) -> Schedule:
    """Return the fastest of all schedules that have a name and of those that list scheduling finds.

    List scheduling (Graham, 1966, doi:10.1002/j.1538-7305.1966.tb01709.x) lets each rank that is free take the most
    urgent action that can start; here by several notions of urgency, on stages that go around the ranks and on stages
    that go there and back. Transfers take no time. Equal arguments give equal schedules.

    Args:
        times: of each stage; a multiple of the ranks.
        num_ranks: pipeline ranks.
        num_microbatches: microbatches of a step.
        max_live: activations, each of one stage and microbatch, that a rank may hold at once; None: any number.
        placement: the rank of each stage; None: any that a named schedule has.

    Raises:
        ScheduleError: QN208 if the stages do not divide over the ranks, or no schedule keeps to ``max_live``.

    >>> from .kinds import interleaved, zero_bubble_v
    >>> times = [StageTimes(2, 2, 1), StageTimes(1, 1, 1), StageTimes(1, 1, 1), StageTimes(1, 2, 1)]
    >>> [makespan(named(2, 4), times) for named in (interleaved, zero_bubble_v)]
    [35.0, 36.0]
    >>> makespan(synthesized(times, 2, 4, max_live=4), times)
    34.0
    """
    virtual_stages, remainder = divmod(len(times), max(1, num_ranks))
    if remainder or not virtual_stages:
        raise ScheduleError("QN208", f"{len(times)} stages cannot be spread evenly over {num_ranks} ranks")
    best: tuple[float, Schedule] | None = None
    for candidate in _candidates(times, num_ranks, num_microbatches, virtual_stages, max_live):
        moved = placement is not None and candidate.placement != placement
        if not moved and (max_live is None or max(most_held(candidate)) <= max_live):
            end = makespan(candidate, times)
            if best is None or end < best[0] * (1 - 1e-12):
                best = end, candidate
    if best is None:
        raise ScheduleError(
            "QN208", f"no schedule of {len(times)} stages on {num_ranks} ranks holds {max_live} activations or fewer",
            fix=f"allow {virtual_stages}",
        )  # fmt: skip
    return best[1]


def makespan(schedule: Schedule, times: Sequence[StageTimes]) -> float:
    """Return when the last action of a plain pipeline ends, in the unit of ``times``."""
    lines = earliest_spans(schedule, chain(schedule.num_stages), lambda action: times[action.stage].time_of(action.op))
    return max(line[-1].end for line in lines)


def _candidates(
    times: Sequence[StageTimes], num_ranks: int, num_microbatches: int, virtual_stages: int, max_live: int | None
) -> Iterator[Schedule]:
    for make in SCHEDULES.values():
        try:
            yield make(num_ranks, num_microbatches, virtual_stages)
        except ScheduleError:  # it does not have so many stages per rank
            continue
    placements = [looped(num_ranks, virtual_stages)]
    placements += [there_and_back(num_ranks)] if virtual_stages == 2 and num_ranks > 1 else []
    for placement in placements:
        for urgency in URGENCIES:
            schedule = _Listing(times, placement, num_microbatches, max_live, urgency).list_actions()
            if schedule is not None:
                yield schedule


Urgency = Callable[[Action], tuple[int, ...]]

# Smaller is more urgent. Among equals: the latest stage, from which gradients come soonest. Weight halves wait until
# there is nothing else to do, or no room.
URGENCIES: tuple[Urgency, ...] = (
    lambda a: ((Op.BACKWARD_INPUT, Op.FORWARD, Op.BACKWARD_WEIGHT).index(a.op), -a.stage),
    lambda a: ((Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT).index(a.op), -a.stage),
    lambda a: (a.op is Op.BACKWARD_WEIGHT, a.microbatch, -a.stage),
)


class _Listing:
    """One run of list scheduling."""

    def __init__(
        self,
        times: Sequence[StageTimes],
        placement: tuple[int, ...],
        num_microbatches: int,
        max_live: int | None,
        urgency: Urgency,
    ) -> None:
        self.times, self.placement, self.count, self.urgency = times, placement, num_microbatches, urgency
        self.limit = len(placement) * num_microbatches if max_live is None else max_live
        self.rows: list[list[Action]] = [[] for _ in range(1 + max(placement))]
        self.stages = [
            [stage for stage, home in enumerate(placement) if home == rank] for rank in range(len(self.rows))
        ]
        self.live = [0] * len(self.rows)
        # how many microbatches of each stage have begun and ended each operation
        self.begun = {(op, stage): 0 for op in (Op.FORWARD, *HALVES) for stage in range(len(placement))}
        self.ended = dict(self.begun)

    def list_actions(self) -> Schedule | None:
        """Return the schedule, or None if the limit on memory brings it to a halt."""
        events: list[tuple[float, int, Action]] = []
        busy: set[int] = set()
        now = 0.0
        while True:
            for rank in range(len(self.rows)):
                ready = [] if rank in busy else [a for a in self._ready(rank) if self._fits(rank, a)]
                if ready:
                    action = min(ready, key=self.urgency)
                    self._begin(rank, action)
                    busy.add(rank)
                    heapq.heappush(events, (now + self.times[action.stage].time_of(action.op), rank, action))
            if not events:
                break
            now = events[0][0]
            while events and events[0][0] <= now:
                _, rank, action = heapq.heappop(events)
                self.ended[action.op, action.stage] += 1
                self.live[rank] -= action.op in RELEASES
                busy.discard(rank)
        if any(count < self.count for count in self.ended.values()):
            return None
        return Schedule(SYNTHESIZED, self.count, self.placement, tuple(map(tuple, self.rows)))

    def _ready(self, rank: int) -> Iterator[Action]:
        last = len(self.placement) - 1
        for stage in self.stages[rank]:
            forwards = self.ended[Op.FORWARD, stage - 1] if stage else self.count
            after = self.ended[Op.BACKWARD_INPUT, stage + 1] if stage < last else self.count
            inputs = min(after, self.ended[Op.FORWARD, stage])
            weights = self.ended[Op.BACKWARD_INPUT, stage]
            for op, ready in ((Op.FORWARD, forwards), (Op.BACKWARD_INPUT, inputs), (Op.BACKWARD_WEIGHT, weights)):
                if self.begun[op, stage] < ready:
                    yield Action(op, stage, self.begun[op, stage])

    def _fits(self, rank: int, action: Action) -> bool:
        """Return whether a forward leaves room for the rank's later stages, which its microbatch must pass."""
        later = len(self.stages[rank]) - 1 - self.stages[rank].index(action.stage)
        return action.op is not Op.FORWARD or self.live[rank] + later < self.limit

    def _begin(self, rank: int, action: Action) -> None:
        self.rows[rank].append(action)
        self.begun[action.op, action.stage] += 1
        self.live[rank] += action.op is Op.FORWARD
