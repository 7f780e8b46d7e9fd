"""Discrete events: ranks take their actions in order and wait for their inputs; transfers are concurrent."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..schedules.schedule import COMPUTE, DIRECTION, SEND, Action, Flow, Op, Schedule
from .faults import RankGroup
from .work import ActionWork, Durations

Key = tuple[int, Action]  # a column, and the send of a transfer


@dataclass(frozen=True, slots=True)
class SimulatedSpan:
    """An action of a rank in time; ``work``: its parts, stretched to the time that it took."""

    start: float
    end: float
    action: Action | None  # None: what runs once, before the first action
    index: int
    work: ActionWork
    waited: float = 0.0  # seconds of the wait before it in which its inputs were on the wire


@dataclass(frozen=True, slots=True)
class Flight:
    """A transfer in time: ``posted`` by the sender, on the wire from ``start`` to ``end``."""

    send: Action
    posted: float
    start: float
    end: float
    source: int
    target: int


@dataclass
class SimulatedRank:
    """One simulated rank."""

    row: RankGroup
    actions: Sequence[Action]
    spans: list[SimulatedSpan] = field(default_factory=list)
    after: list[float] = field(default_factory=list)  # when each action was over
    flights: list[Flight] = field(default_factory=list)  # of what it sends
    cursor: int = -1
    free: float = 0.0  # when it last stopped computing
    work: ActionWork | None = None
    started: float = 0.0
    remaining: float = 0.0  # seconds of its work, at full speed
    version: int = 0  # of the event that ends its work

    @property
    def done(self) -> bool:
        """Return whether it took all of its actions."""
        return self.cursor == len(self.actions)


class Engine:
    """Runs all rows of a schedule. Events at equal times are taken in the order of rows, so that runs are alike.

    Where ranks share ``durations.cores``, those that compute at the same time slow each other down.
    """

    def __init__(self, schedule: Schedule, flow: Flow, rows: Sequence[RankGroup], durations: Durations) -> None:
        self.schedule, self.flow, self.durations = schedule, flow, durations
        self.lines = [SimulatedRank(row, schedule.actions[row.place]) for row in rows]
        self.at = {(line.row.column, line.row.place): index for index, line in enumerate(self.lines)}
        self.events: list[tuple[float, int, int]] = []
        self.posted: dict[Key, tuple[float, bool]] = {}
        self.flights: dict[Key, Flight] = {}
        self.channels: dict[tuple[int, int, int, Op], float] = {}
        self.needs: dict[Action, list[Action]] = {}
        self.clock, self.rate = 0.0, 1.0  # of ranks that share cores

    def run_actions(self) -> list[SimulatedRank]:
        """Run all actions.

        Raises:
            ScheduleError: QN208 if some action can never start.
        """
        for index, line in enumerate(self.lines):
            self._start(index, self.durations.begin(line.row.place), 0.0)
        while self.events:
            now, index, version = heapq.heappop(self.events)
            line = self.lines[index]
            if version == -1:  # something arrived
                if line.work is None:
                    self._advance(index, now)
            elif line.work is not None and version == line.version:
                self._finish(index, now)
                self._advance(index, now)
        if stuck := [line for line in self.lines if not line.done]:
            places = [(line.row.place, max(line.cursor, 0)) for line in stuck]
            waiting = ", ".join(f"rank {place} at {self.schedule.actions[place][index]}" for place, index in places)
            raise self.schedule.error(f"some actions can never start: {waiting}", *places)
        return self.lines

    # -- computing

    def _start(self, index: int, work: ActionWork, now: float) -> None:
        line = self.lines[index]
        self._progress(now)
        line.work, line.started = work.scaled(line.row.compute, line.row.links), now
        line.remaining = line.work.seconds
        self._plan(now, index)

    def _finish(self, index: int, now: float) -> None:
        line = self.lines[index]
        work = line.work
        assert work is not None
        self._progress(now)
        line.work = None
        self._plan(now, index)
        if self.durations.cores is not None and work.seconds:
            stretch = (now - line.started) / work.seconds
            work = work.scaled(stretch, dict.fromkeys((part.axis for part in work.parts), stretch))
        action = line.actions[line.cursor] if line.cursor >= 0 else None
        line.spans.append(SimulatedSpan(line.started, now, action, line.cursor, work, self._waited(line, action)))
        line.free = now
        if line.cursor >= 0:
            line.after.append(now)
        line.cursor += 1

    def _progress(self, now: float) -> None:
        """Note how far each rank has come until now, where ranks share cores."""
        if self.durations.cores is not None:
            for line in self.lines:
                if line.work is not None:
                    line.remaining = max(0.0, line.remaining - (now - self.clock) * self.rate)
            self.clock = now

    def _plan(self, now: float, changed: int) -> None:
        """Add the events of when running work will end, after one line began or ended."""
        lines = [self.lines[changed]] if self.durations.cores is None else self.lines
        busy = [line for line in lines if line.work is not None]
        if self.durations.cores is not None:
            self.rate = min(1.0, self.durations.cores / max(1, sum(line.row.count for line in busy)))
        for line in busy:
            line.version += 1
            index = self.at[line.row.column, line.row.place]
            heapq.heappush(self.events, (now + line.remaining / self.rate, index, line.version))

    def _waited(self, line: SimulatedRank, action: Action | None) -> float:
        if action is None or line.started <= line.free:
            return 0.0
        needed = [self.flights[line.row.column, send] for send in self._needed(action)]
        on_wire = [line.started - max(line.free, flight.start) for flight in needed if flight.end > line.free]
        return max([0.0, *on_wire])

    # -- actions

    def _advance(self, index: int, now: float) -> None:
        line = self.lines[index]
        while not line.done:
            action = line.actions[line.cursor]
            if action.op in COMPUTE:
                flights = [self.flights.get((line.row.column, send)) for send in self._needed(action)]
                if any(flight is None for flight in flights):
                    return  # a later arrival takes this up again
                ready = max([flight.end for flight in flights if flight is not None], default=now)
                if ready <= now:
                    self._start(index, self.durations.work(action), now)
                return  # else its arrival is among the events
            if action.op in DIRECTION:
                self._post(line, action, now)
            line.after.append(now)
            line.cursor += 1

    def _needed(self, action: Action) -> list[Action]:
        """Return the sends, of other ranks, whose values an action reads."""
        if action not in self.needs:
            placement = self.schedule.placement
            rank = placement[action.stage]
            self.needs[action] = [
                Action(SEND[way], stage, action.microbatch, action.stage)
                for way, stage in self.flow.needs(action)
                if placement[stage] != rank
            ]
        return self.needs[action]

    def _post(self, line: SimulatedRank, action: Action, now: float) -> None:
        """Post one side of a transfer: it begins when both sides are posted and its channel is free."""
        send = action if action.op in SEND.values() else action.partner
        key = line.row.column, send
        if key not in self.posted:
            self.posted[key] = now, action is send
            return
        first, by_sender = self.posted.pop(key)
        placement = self.schedule.placement
        source, target = placement[send.stage], placement[send.peer]
        sender = self.lines[self.at[line.row.column, source]]
        channel = line.row.column, source, target, DIRECTION[send.op]
        start = max(now, self.channels.get(channel, 0.0))
        seconds = self.durations.transfer(send) * sender.row.sends.get(target, 1.0)
        end = self.channels[channel] = start + seconds
        flight = Flight(send, first if by_sender else now, start, end, source, target)
        self.flights[key] = flight
        sender.flights.append(flight)
        heapq.heappush(self.events, (end, self.at[line.row.column, target], -1))
