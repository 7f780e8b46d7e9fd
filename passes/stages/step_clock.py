"""How long a step takes for many cuts at once: the schedule is run with the times of all of them side by side."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...schedules.schedule import COMPUTE, MAKES, Action, Flow, Op, Schedule, chain, simulate
from .partition import Array

_Key = tuple[Op, int, int]  # a direction, a stage, a microbatch


@dataclass(frozen=True)
class StepClock:
    """Every action starts as soon as its rank is free and its values are there, as in
    :func:`...schedules.schedule.simulate`, on a plain chain of stages."""

    schedule: Schedule

    @cached_property
    def ops(self) -> frozenset[Op]:
        """What its ranks compute."""
        return frozenset(action.op for row in self.schedule.actions for action in row if action.op in COMPUTE)

    @cached_property
    def order(self) -> tuple[tuple[int, Action, tuple[tuple[_Key, int], ...]], ...]:
        """Each action with its rank, behind all that it waits for: values, and where they cross between ranks (the
        boundary behind that stage; -1: nowhere)."""
        home, edges = self.schedule.placement, chain(self.schedule.num_stages)
        flow = Flow.of(edges, self.schedule.num_stages)
        lines = simulate(self.schedule, edges, lambda action: 1.0)
        spans = sorted((span.start, rank, place) for rank, line in enumerate(lines) for place, span in enumerate(line))
        found = []
        for _, rank, place in spans:
            action = lines[rank][place].action
            needs = [((way, stage, action.microbatch), -1 if home[stage] == rank else min(stage, action.stage))
                     for way, stage in flow.needs(action)]  # fmt: skip
            found.append((rank, action, tuple(needs)))
        return tuple(found)

    def seconds(self, times: dict[Op, Array], sends: Array) -> Array:
        """Of cut ``k``: ``times[op][s, k]`` seconds of an action on stage s, ``sends[way, s, k]`` of the way between
        stages s and s + 1, forward and backward. No memory is kept but for values that are still to be read."""
        nothing = np.zeros(sends.shape[-1])
        free = [nothing] * self.schedule.num_ranks
        made: dict[_Key, Array] = {}
        for rank, action, needs in self.order:
            start = free[rank]
            for key, boundary in needs:
                there = made[key]
                if boundary >= 0:
                    there = there + sends[0 if key[0] is Op.FORWARD else 1, boundary]
                start = np.maximum(start, there)
            free[rank] = end = start + times[action.op][action.stage]
            if action.op in MAKES:
                made[MAKES[action.op], action.stage, action.microbatch] = end
        longest: Array = np.max(free, axis=0)
        return longest
