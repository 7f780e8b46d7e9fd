"""Pipeline schedules as data: for each pipeline rank, the actions it takes, in order.

One :class:`Schedule` object is checked (:mod:`.check`), printed, simulated and executed; there is no
second copy. A generator (:mod:`.kinds`) returns the compute actions; :func:`with_transfers` lowers them to
what ranks execute.
"""

from __future__ import annotations

import enum
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from ..core.errors import CompileError


class ScheduleError(CompileError):
    """A schedule is not valid (QN208); a ``ValueError`` that names the rank and shows the place."""


class Op(enum.Enum):
    """The kind of an action; the value is its printed form."""

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"  # the half of a backward that other stages wait for
    BACKWARD_WEIGHT = "W"  # the half that only this stage's parameters need; it releases the activations
    SEND_FORWARD = "SF"
    RECV_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECV_BACKWARD = "RB"
    REDUCE = "R"


COMPUTE = frozenset({Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT})
RELEASES = frozenset({Op.BACKWARD, Op.BACKWARD_WEIGHT})  # after these a microbatch's activations are dead

# A direction is Op.FORWARD (values) or Op.BACKWARD (their gradients).
SEND = MappingProxyType({Op.FORWARD: Op.SEND_FORWARD, Op.BACKWARD: Op.SEND_BACKWARD})
RECEIVE = MappingProxyType({Op.FORWARD: Op.RECV_FORWARD, Op.BACKWARD: Op.RECV_BACKWARD})
DIRECTION = MappingProxyType({op: way for side in (SEND, RECEIVE) for way, op in side.items()})
# The value that a compute action computes: a stage's outputs, or the gradients of its inputs.
MAKES = MappingProxyType({Op.FORWARD: Op.FORWARD, Op.BACKWARD: Op.BACKWARD, Op.BACKWARD_INPUT: Op.BACKWARD})

_PARTNER = MappingProxyType({a[way]: b[way] for a, b in ((SEND, RECEIVE), (RECEIVE, SEND)) for way in SEND})
_TEXT = re.compile(r"(\d+)(SF|RF|SB|RB|F|B|I|W|R)(\d+)?(?:[<>](\d+))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that a rank does. ``peer`` is the other *stage* of a transfer.

    Raises:
        ScheduleError: QN208 when a microbatch or a peer is missing, or given where the op has none.

    >>> str(Action(Op.SEND_FORWARD, stage=2, microbatch=0, peer=3)), str(Action(Op.REDUCE, stage=2))
    ('2SF0>3', '2R')
    >>> Action.parse("3RF0<2") == Action(Op.SEND_FORWARD, 2, 0, 3).partner
    True
    """

    op: Op
    stage: int
    microbatch: int = -1
    peer: int = -1

    def __post_init__(self) -> None:
        reduce, transfer = self.op is Op.REDUCE, self.op in _PARTNER
        if self.stage < 0 or (self.microbatch < 0) is not reduce or (self.peer < 0) is transfer:
            fields = f"stage {self.stage}, microbatch {self.microbatch}, peer {self.peer}"
            fix = "give every op but REDUCE a microbatch, and transfers (only) a peer stage"
            raise ScheduleError("QN208", f"{self.op.name} cannot have {fields}", fix=fix)

    def __str__(self) -> str:
        microbatch = "" if self.microbatch < 0 else str(self.microbatch)
        arrow = ">" if self.op in (Op.SEND_FORWARD, Op.SEND_BACKWARD) else "<"
        return f"{self.stage}{self.op.value}{microbatch}" + ("" if self.peer < 0 else f"{arrow}{self.peer}")

    @classmethod
    def parse(cls, text: str) -> Action:
        """Return the action that prints as ``text``.

        Raises:
            ScheduleError: QN208 when no action prints so.
        """
        if match := _TEXT.fullmatch(text):
            stage, op, microbatch, peer = match.groups()
            action = cls(Op(op), int(stage), int(microbatch or -1), int(peer or -1))
            if str(action) == text:  # also refuses arrows that point the wrong way
                return action
        raise ScheduleError("QN208", f"{text!r} is not an action", fix="write 2F0, 2SF0>3, 3RF0<2 or 2R")

    @property
    def partner(self) -> Action:
        """Return the other side of a transfer."""
        return Action(_PARTNER[self.op], self.peer, self.microbatch, self.stage)


@dataclass(frozen=True, order=True)
class StageEdge:
    """Values that stage ``source`` computes and stage ``target`` reads; ``backward``: gradients flow back.

    Raises:
        ScheduleError: QN208 unless ``0 <= source < target``.
    """

    source: int
    target: int
    backward: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.source < self.target:
            raise ScheduleError("QN208", f"an edge cannot lead from stage {self.source} to {self.target}")


def chain(num_stages: int) -> tuple[StageEdge, ...]:
    """Return the edges of a plain pipeline: every stage feeds the next."""
    return tuple(StageEdge(stage, stage + 1) for stage in range(num_stages - 1))


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule; ``str()`` draws it.

    Attributes:
        actions: a row per pipeline rank, in order.
        placement: the rank of each stage.

    Raises:
        ScheduleError: QN208 without stages or microbatches, or where a stage's rank does not exist.
    """

    name: str
    num_microbatches: int
    placement: tuple[int, ...]
    actions: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        if self.num_microbatches < 1 or not self.placement:
            raise ScheduleError("QN208", f"{self.name} needs at least one stage and one microbatch")
        for stage, rank in enumerate(self.placement):
            if not 0 <= rank < self.num_ranks:
                raise ScheduleError("QN208", f"stage {stage} is placed on rank {rank} of {self.num_ranks}")

    @property
    def num_stages(self) -> int:
        """Return the number of stages of all ranks together."""
        return len(self.placement)

    @property
    def num_ranks(self) -> int:
        """Return the number of pipeline ranks."""
        return len(self.actions)

    def __str__(self) -> str:
        from .grid import grid

        return grid(self)

    def error(self, problem: str, *places: tuple[int, int]) -> ScheduleError:
        """Return an error that shows the actions around each place, a (rank, index into its actions)."""
        lines = [problem]
        for rank, position in places:
            row = [*map(str, self.actions[rank]), "(end)"]
            lines.append(f"  rank {rank}:")
            for index in range(max(0, position - 3), min(len(row), position + 3)):
                lines.append(f"  {index:6}  {row[index]}" + ("  <-- here" if index == position else ""))
        return ScheduleError("QN208", "\n".join(lines))


@dataclass(frozen=True)
class Flow:
    """The edges by (direction, stage): the stages that it reads from, and those that read from it."""

    incoming: Mapping[tuple[Op, int], tuple[int, ...]]
    outgoing: Mapping[tuple[Op, int], tuple[int, ...]]

    @classmethod
    def from_edges(cls, edges: Iterable[StageEdge], num_stages: int) -> Flow:
        """Return the flow of edges.

        Raises:
            ScheduleError: QN208 for an edge to a stage that does not exist.
        """
        links: set[tuple[Op, int, int]] = set()
        for edge in edges:
            if edge.target >= num_stages:
                raise ScheduleError("QN208", f"{edge} leads out of the {num_stages} stages")
            links.add((Op.FORWARD, edge.source, edge.target))
            if edge.backward:
                links.add((Op.BACKWARD, edge.target, edge.source))
        incoming: dict[tuple[Op, int], tuple[int, ...]] = {
            (way, stage): () for way in SEND for stage in range(num_stages)
        }
        outgoing = dict(incoming)
        for way, source, target in sorted(links, key=lambda link: (link[0].value, *link[1:])):
            outgoing[way, source] += (target,)
            incoming[way, target] += (source,)
        return cls(incoming, outgoing)

    def needs(self, action: Action) -> list[tuple[Op, int]]:
        """Return the values of its microbatch that a compute action reads: (direction, stage that computes it)."""
        if action.op is Op.BACKWARD_WEIGHT:
            return [(Op.BACKWARD, action.stage)]
        way = MAKES[action.op]
        saved = [(Op.FORWARD, action.stage)] if way is Op.BACKWARD else []
        return saved + [(way, stage) for stage in self.incoming[way, action.stage]]


class ActionSpan(NamedTuple):
    """A compute action in simulated time, in the unit of the durations that were simulated with."""

    start: float
    end: float
    action: Action


def earliest_spans(
    schedule: Schedule,
    edges: Iterable[StageEdge],
    duration: Callable[[Action], float],
    transfer: Callable[[int, int], float] = lambda source, target: 0.0,
) -> tuple[tuple[ActionSpan, ...], ...]:
    """Return per rank when each compute action runs if all start as early as they can.

    ``transfer``: the time of a value between two stages on different ranks; by default none.

    Raises:
        ScheduleError: QN208 when some action can never start, or its stage does not exist.
    """
    flow = Flow.from_edges(edges, schedule.num_stages)
    rows = [[action for action in row if action.op in COMPUTE] for row in schedule.actions]
    if unknown := next((a for row in rows for a in row if a.stage >= schedule.num_stages), None):
        raise ScheduleError("QN208", f"{unknown} is not of {schedule.num_stages} stages")
    exists: dict[tuple[Op, int], dict[int, float]] = defaultdict(dict)  # when each value of a microbatch exists
    inputs = _inputs(schedule, flow, rows, transfer, exists)
    lines: list[list[ActionSpan]] = [[] for _ in rows]
    moved = True
    while moved:
        moved = False
        for row, line in zip(rows, lines, strict=True):
            end = line[-1].end if line else 0.0
            for action in row[len(line) :]:
                start = _earliest(inputs[action.op, action.stage], action.microbatch, end)
                if start is None:
                    break
                end = start + duration(action)
                line.append(ActionSpan(start, end, action))
                if action.op in MAKES:
                    exists[MAKES[action.op], action.stage][action.microbatch] = end
                moved = True
    _require_all(schedule, rows, lines)
    return tuple(map(tuple, lines))


# values that an action reads: when that of each microbatch exists, and seconds of its transfer
_Inputs = list[tuple[dict[int, float], float]]


def _inputs(
    schedule: Schedule,
    flow: Flow,
    rows: Iterable[Iterable[Action]],
    transfer: Callable[[int, int], float],
    exists: Mapping[tuple[Op, int], dict[int, float]],
) -> dict[tuple[Op, int], _Inputs]:
    """Return the inputs of each operation of each stage."""
    rank = schedule.placement
    inputs: dict[tuple[Op, int], _Inputs] = {}
    for action in {(action.op, action.stage): action for row in rows for action in row}.values():
        needs = flow.needs(action)
        seconds = [0.0 if rank[s] == rank[action.stage] else transfer(s, action.stage) for _, s in needs]
        inputs[action.op, action.stage] = [(exists[n], time) for n, time in zip(needs, seconds, strict=True)]
    return inputs


def _earliest(inputs: _Inputs, microbatch: int, start: float) -> float | None:
    """Return when an action can start, not before ``start``; None if one of its inputs does not exist yet."""
    for times, seconds in inputs:
        time = times.get(microbatch)
        if time is None:
            return None
        start = max(start, time + seconds)
    return start


def _require_all(schedule: Schedule, rows: list[list[Action]], lines: list[list[ActionSpan]]) -> None:
    waiting = [row[len(line)] if len(line) < len(row) else None for row, line in zip(rows, lines, strict=True)]
    if stuck := [(rank, action) for rank, action in enumerate(waiting) if action is not None]:
        problem = ", ".join(f"rank {rank} at {action}" for rank, action in stuck)
        places = [(rank, schedule.actions[rank].index(action)) for rank, action in stuck]
        raise schedule.error(f"some actions can never start: {problem}", *places)


def most_held(schedule: Schedule, size: Callable[[int], int] = lambda stage: 1) -> tuple[int, ...]:
    """Return per rank the most that activations of its stages take at once; ``size``: of a stage's microbatch."""
    peaks = []
    for row in schedule.actions:
        now = most = 0
        for action in row:
            if action.op is Op.FORWARD:
                now += size(action.stage)
                most = max(most, now)
            elif action.op in RELEASES:
                now -= size(action.stage)
        peaks.append(most)
    return tuple(peaks)


def _durations(forward: float, backward: float) -> Callable[[Action], float]:
    table = {Op.FORWARD: forward, Op.BACKWARD: backward}
    return lambda action: table.get(action.op, backward / 2)


def bubble(schedule: Schedule, edges: Iterable[StageEdge], *, forward: float = 1.0, backward: float = 2.0) -> float:
    """Return the share (0 to 1) of all ranks' time that is idle when every stage's actions take these times.

    ``forward`` and ``backward`` are in any one unit; each half of a split backward takes ``backward / 2``.

    Raises:
        ScheduleError: QN208 when the schedule never ends, or takes no time.
    """
    lines = earliest_spans(schedule, edges, _durations(forward, backward))
    total = schedule.num_ranks * max((span.end for line in lines for span in line), default=0.0)
    if total <= 0:
        raise ScheduleError("QN208", f"{schedule.name} takes no time, so that no share of it is idle")
    return 1 - sum(span.end - span.start for line in lines for span in line) / total


def with_transfers(schedule: Schedule, edges: Iterable[StageEdge], *, hoist: int = 1) -> Schedule:
    """Return what ranks execute: the compute actions, with sends, receives and reductions of gradients.

    Each transfer gets its place in one simulated order and both sides list it there. So all ranks' lists are
    parts of one total order, and not even transfers that block both sides can deadlock. Then each receive is
    posted up to ``hoist`` compute actions earlier, to overlap with them. That needs transfers that do not
    block, and one channel per ordered pair of ranks and direction (values, gradients); ``hoist=0`` does not.

    Ensures: :func:`.check.verify_schedule` passes.

    Raises:
        ScheduleError: QN208 when ``schedule`` has transfers already, cannot run, or ``hoist`` is negative.

    >>> from .kinds import one_f_one_b
    >>> for row in with_transfers(one_f_one_b(2, 2), chain(2), hoist=0).actions:
    ...     print(*row)
    0F0 0SF0>1 0F1 0SF1>1 0RB0<1 0B0 0RB1<1 0B1 0R
    1RF0<0 1F0 1RF1<0 1B0 1SB0>0 1F1 1B1 1SB1>0 1R
    """
    if hoist < 0 or any(action.op not in COMPUTE for row in schedule.actions for action in row):
        problem = f"{schedule.name} must have compute actions only, and hoist={hoist} be 0 or more"
        raise ScheduleError("QN208", problem)
    edges = tuple(edges)
    flow, rank_of = Flow.from_edges(edges, schedule.num_stages), schedule.placement
    # The key is the total order: at equal times, transfers come before the compute actions that need them.
    events: list[list[tuple[tuple[float, int, str, int, int], Action]]] = [[] for _ in schedule.actions]
    for rank, line in enumerate(earliest_spans(schedule, edges, _durations(1.0, 2.0))):
        for start, end, action in line:
            events[rank].append(((start, 1, "", 0, 0), action))
            if way := MAKES.get(action.op):
                for peer in flow.outgoing[way, action.stage]:
                    if rank_of[peer] != rank:
                        send = Action(SEND[way], action.stage, action.microbatch, peer)
                        key = (end, 0, way.value, action.stage, peer)
                        events[rank].append((key, send))
                        events[rank_of[peer]].append((key, send.partner))
    rows = [[action for _, action in sorted(row, key=lambda event: event[0])] for row in events]
    return replace(schedule, actions=tuple(tuple(_with_reductions(_hoisted(row, hoist))) for row in rows))


def _hoisted(row: list[Action], hoist: int) -> list[Action]:
    # All receives move over as many compute actions, so none passes another: a channel delivers in order.
    row = list(row)
    for index, action in enumerate(row):
        if action.op in RECEIVE.values():
            place, remaining, earlier = index, hoist, index
            while remaining and earlier:
                earlier -= 1
                if row[earlier].op in COMPUTE:
                    place, remaining = earlier, remaining - 1
            row.insert(place, row.pop(index))
    return row


def _with_reductions(row: list[Action]) -> list[Action]:
    # After the last gradients are sent: another stage waits for those, and none for the reduction.
    settles = {*RELEASES, Op.SEND_BACKWARD}
    last = {action.stage: index for index, action in enumerate(row) if action.op in settles}
    result: list[Action] = []
    for index, action in enumerate(row):
        result.append(action)
        if last.get(action.stage) == index:
            result.append(Action(Op.REDUCE, action.stage))
    return result
