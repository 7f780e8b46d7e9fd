"""Simulate a step for many cuts at once: every time is an array with an element for each cut."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...schedules.schedule import COMPUTE, MAKES, Action, Flow, Op, Schedule, chain, earliest_spans
from .partition import Array

_Key = tuple[Op, int, int]  # a direction, a stage, a microbatch


@dataclass(frozen=True)
class StepClock:
    """A simulation of a schedule on a plain chain of stages.

    Every action starts as soon as its rank is free and its inputs have arrived, as in
    :func:`...schedules.schedule.earliest_spans`.
    """

    schedule: Schedule

    @cached_property
    def ops(self) -> frozenset[Op]:
        """The kinds of actions that compute."""
        return frozenset(action.op for row in self.schedule.actions for action in row if action.op in COMPUTE)

    @cached_property
    def order(self) -> tuple[tuple[int, Action, tuple[tuple[_Key, int], ...]], ...]:
        """The rank, action and inputs of each action, in an order in which they can run.

        Each input comes with the stage before the boundary that it crosses between ranks, or -1.
        """
        home, edges = self.schedule.placement, chain(self.schedule.num_stages)
        flow = Flow.from_edges(edges, self.schedule.num_stages)
        lines = earliest_spans(self.schedule, edges, lambda action: 1.0)
        spans = sorted((span.start, rank, place) for rank, line in enumerate(lines) for place, span in enumerate(line))
        ordered = []
        for _, rank, place in spans:
            action = lines[rank][place].action
            needs = [
                ((direction, stage, action.microbatch), -1 if home[stage] == rank else min(stage, action.stage))
                for direction, stage in flow.needs(action)
            ]
            ordered.append((rank, action, tuple(needs)))
        return tuple(ordered)

    def seconds(self, times: dict[Op, Array], sends: Array) -> Array:
        """Return the seconds of a step for each cut.

        ``times[op][s, k]``: of an action on stage s under cut k. ``sends[direction, s, k]``: between stages s and
        s + 1, forward and backward.
        """
        nothing = np.zeros(sends.shape[-1])
        free = [nothing] * self.schedule.num_ranks
        finished: dict[_Key, Array] = {}
        for rank, action, needs in self.order:
            start = free[rank]
            for key, boundary in needs:
                arrival = finished[key]
                if boundary >= 0:
                    arrival = arrival + sends[0 if key[0] is Op.FORWARD else 1, boundary]
                start = np.maximum(start, arrival)
            free[rank] = end = start + times[action.op][action.stage]
            if action.op in MAKES:
                finished[MAKES[action.op], action.stage, action.microbatch] = end
        longest: Array = np.max(free, axis=0)
        return longest
