"""Simulation of textbook programs: when each rank does what, what it waits for, and what it holds."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..core.annotations import format_bytes
from ..core.errors import CompileError
from ..simulation.timeline import Event, MemorySample, RankTimeline, Timeline
from .given import check_programs
from .machine import Machine
from .steps import Collective, Compute, Hold, Receive, Release, Send, Step, Wait


@dataclass
class _TextbookRank:
    number: int
    steps: Sequence[Step]
    at: int = 0  # the next step
    clock: float = 0.0
    lane: float = 0.0  # when its communication in the background is free
    events: list[Event] = field(default_factory=list)
    done: dict[str, float] = field(default_factory=dict)  # background collectives: their ends
    held: dict[str, float] = field(default_factory=dict)
    memory: list[MemorySample] = field(default_factory=list)
    arrived: tuple[int, float] | None = None  # at a collective: which of its kind, and when

    @property
    def next(self) -> Step | None:
        """Return the next step, if there is one."""
        return self.steps[self.at] if self.at < len(self.steps) else None


@dataclass
class _TextbookWorld:
    machine: Machine
    ranks: list[_TextbookRank]
    messages: dict[tuple[int, int], deque[tuple[float, float]]] = field(default_factory=lambda: defaultdict(deque))
    links: dict[tuple[int, int], float] = field(default_factory=dict)

    def take_all_steps(self) -> None:
        """Take all steps.

        Raises:
            CompileError: QN208 if ranks wait for ever.
        """
        moved = True
        while moved:
            moved = sum(map(self._advance, self.ranks)) > 0
        stuck = [rank for rank in self.ranks if rank.next is not None]
        if stuck:
            lines = [f"rank {rank.number} waits in {rank.next}" for rank in stuck[:8]]
            raise CompileError(
                "QN208", "\n  ".join(lines), fix="let every receive have a send, and ranks meet in equal collectives"
            )

    def _advance(self, rank: _TextbookRank) -> bool:
        moved = False
        while rank.next is not None and self._step(rank, rank.next):
            rank.at += 1
            moved = True
        return moved

    def _step(self, rank: _TextbookRank, step: Step) -> bool:
        """Do a step if that is possible now."""
        if isinstance(step, Compute):
            seconds = step.seconds + step.flops / self.machine.flops_per_second
            event = Event(rank.clock, rank.clock + seconds, step.kind, step.name, -1, step.microbatch)
            rank.events.append(event)
            rank.clock += seconds
        elif isinstance(step, Send):
            self._send(rank, step)
        elif isinstance(step, Receive):
            box = self.messages[step.source, rank.number]
            if not box:
                return False
            rank.clock = max(rank.clock, box.popleft()[1])
        elif isinstance(step, Collective):
            return self._meet(rank, step)
        elif isinstance(step, Wait):
            if step.name not in rank.done:
                return False
            rank.clock = max(rank.clock, rank.done.pop(step.name))
        else:
            self._remember(rank, step)
        return True

    def _send(self, rank: _TextbookRank, step: Send) -> None:
        pair = rank.number, step.to
        start = max(rank.clock, self.links.get(pair, 0.0))
        link = self.machine.joins(*pair)
        self.links[pair] = start + step.bytes / link.bytes_per_second  # the next message may follow at once
        end = start + link.time(step.bytes)
        self.messages[pair].append((start, end))
        rank.events.append(Event(start, end, "transfer", step.name, axis="pp"))

    def _meet(self, rank: _TextbookRank, step: Collective) -> bool:
        """Do a collective, once all of its ranks have come to it."""
        members = [self.ranks[number] for number in step.over]
        if rank not in members:
            raise CompileError("QN208", f"rank {rank.number} is not among those of {step}", fix="name it in over=")
        if any(_conflicts(member.next, step) for member in members):
            lines = [f"rank {member.number} is in {member.next}" for member in members]
            raise CompileError("QN208", "\n  ".join(lines), fix="let all ranks of a collective call the same one")
        if any(member.next != step for member in members):
            return False
        self._communicate(step, members)
        for member in members:
            if member is not rank:
                member.at += 1
        return True

    def _communicate(self, step: Collective, members: Sequence[_TextbookRank]) -> None:
        begin = max(max(member.clock, member.lane) if step.background else member.clock for member in members)
        end = begin + self.machine.collective_seconds(step.kind, step.bytes, step.over)
        name = step.name or step.kind
        for member in members:
            waited = 0.0 if step.background else end - member.clock
            member.events.append(Event(begin, end, "collective", name, axis=step.axis, exposed=waited))
            if step.background:
                member.lane = member.done[name] = end
            else:
                member.clock = end

    def _remember(self, rank: _TextbookRank, step: Hold | Release) -> None:
        if isinstance(step, Release):
            if rank.held.pop(step.name, None) is None:
                raise CompileError("QN208", f"rank {rank.number} holds no {step.name}", fix="hold it first")
        else:
            rank.held[step.name] = rank.held.get(step.name, 0.0) + step.bytes
        now = int(sum(rank.held.values()))
        if now > self.machine.memory_bytes:
            raise CompileError(
                "QN212",
                f"rank {rank.number} needs {format_bytes(now)} for {', '.join(rank.held)}, and its device has "
                f"{format_bytes(self.machine.memory_bytes)}",
                fix="split more, or hold less",
            )
        rank.memory.append(MemorySample(rank.clock, step.name, now, now, 0))


def _conflicts(other: Step | None, step: Collective) -> bool:
    """Return whether a rank is in another collective of the same ranks."""
    return isinstance(other, Collective) and set(other.over) == set(step.over) and other != step


def simulate(programs: Sequence[Sequence[Step]], machine: Machine, title: str = "textbook") -> Timeline:
    """Return the timeline of programs, one for each rank of ``machine``.

    Two ranks share no link with others; sends never wait.

    Raises:
        CompileError: QN201 for what is no machine, no program for each of its ranks, or no step; QN208 if ranks wait
            for ever, with what each one waits for; QN212 if memory is too small; QN210 for a collective that there is
            not.
    """
    check_programs(programs, machine, title)
    ranks = [_TextbookRank(number, steps) for number, steps in enumerate(programs)]
    _TextbookWorld(machine, ranks).take_all_steps()
    end = max(max([rank.clock, rank.lane, *(event.end for event in rank.events)]) for rank in ranks)
    return Timeline(title, "steps", 1, len(ranks), end, tuple(_row(rank, end) for rank in ranks))


def _row(rank: _TextbookRank, end: float) -> RankTimeline:
    busy = sum(event.seconds for event in rank.events if not event.axis)
    exposed: dict[str, float] = defaultdict(float)
    for event in rank.events:
        exposed[event.axis] += event.exposed
    waits = {axis: seconds for axis, seconds in exposed.items() if seconds}
    bubble = (end - busy - sum(waits.values())) / end if end else 0.0
    events = tuple(sorted(rank.events, key=lambda event: (event.start, event.end)))
    return RankTimeline(rank.number, {}, 1, events, busy, bubble, waits, memory=tuple(rank.memory))
