"""The verifier of schedules: completeness by counting, order and deadlocks by abstract execution."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator

from .schedule import COMPUTE, DIRECTION, MAKES, RECEIVE, RELEASES, SEND, Action, Flow, Op, Schedule, StageEdge

PeakLive = tuple[int, ...]
"""Per rank, the most activations (one per stage and microbatch) that are alive at once."""

Place = tuple[int, int]
"""A rank and an index into its actions."""


def verify_schedule(
    schedule: Schedule, edges: Iterable[StageEdge], *, max_live: int | None = None, rendezvous: bool = False
) -> PeakLive:
    """Check a schedule that :func:`.schedule.with_transfers` made; measure its peak of live activations.

    Invariants:
      - each stage has F and (B, or I and W) of each microbatch exactly once, on its own rank, and one REDUCE
        after its last backward; each edge between ranks has a send and a receive per microbatch; that is all;
      - every value exists before it is sent, and is at hand, or its receive posted, before it is used;
      - with one FIFO channel per ordered pair of ranks and direction, where posting does not block but
        compute waits for its receives, both ends of a channel agree on its order, and no rank waits for ever;
      - with ``rendezvous``, the same where a send and its receive block until both ranks are there (receives
        that were hoisted do not promise this);
      - no rank has more than ``max_live`` activations alive. The weight half of a backward releases them, not
        the input half.

    Raises:
        ScheduleError: QN208 with the rank, the action and the actions around it.
    """
    flow = Flow.of(edges, schedule.num_stages)
    _check_complete(schedule, flow)
    _Execution(schedule, flow, rendezvous=False).run()
    if rendezvous:
        _Execution(schedule, flow, rendezvous=True).run()
    return _peak_live(schedule, max_live)


def _check_complete(schedule: Schedule, flow: Flow) -> None:
    """Every action that must be there is, once, and no other."""
    places: dict[Action, Place] = {}
    for rank, row in enumerate(schedule.actions):
        for index, action in enumerate(row):
            here = rank, index
            if action in places:
                raise schedule.error(f"rank {rank}: {action} is there twice", places[action], here)
            if action.stage >= schedule.num_stages or action.microbatch >= schedule.num_microbatches:
                raise schedule.error(f"rank {rank}: {action} has no such stage or microbatch", here)
            if schedule.placement[action.stage] != rank:
                owner = schedule.placement[action.stage]
                raise schedule.error(f"rank {rank}: {action} belongs to rank {owner}", here)
            places[action] = here

    required = dict.fromkeys(_required(schedule, flow, places.keys()))
    for action, here in places.items():
        if action not in required:
            raise schedule.error(f"rank {here[0]}: no stage or edge asks for {action}", here)
    for action in required:
        if action not in places:
            here = _anchor(schedule, action, places)
            raise schedule.error(f"rank {here[0]}: {action} is missing", here)

    for action, (rank, index) in places.items():
        if action.op in RELEASES and index > places[Action(Op.REDUCE, action.stage)][1]:
            reduce = Action(Op.REDUCE, action.stage)
            raise schedule.error(f"rank {rank}: {reduce} comes before {action} is over", places[reduce])


def _required(schedule: Schedule, flow: Flow, present: Iterable[Action]) -> Iterator[Action]:
    """All actions of a complete schedule; compute actions first, for they locate what else is missing."""
    present = set(present)
    stages, microbatches = range(schedule.num_stages), range(schedule.num_microbatches)
    for stage in stages:
        for microbatch in microbatches:
            yield Action(Op.FORWARD, stage, microbatch)
            halves = [Action(op, stage, microbatch) for op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)]
            split = not present.isdisjoint(halves)
            yield from halves if split else [Action(Op.BACKWARD, stage, microbatch)]
        yield Action(Op.REDUCE, stage)
    for (way, stage), peers in flow.outgoing.items():
        for peer in peers:
            if schedule.placement[stage] != schedule.placement[peer]:
                for microbatch in microbatches:
                    send = Action(SEND[way], stage, microbatch, peer)
                    yield from (send, send.partner)


def _anchor(schedule: Schedule, missing: Action, places: dict[Action, Place]) -> Place:
    """Where to point when ``missing`` is: at the compute action that makes or uses a transfer's value."""
    rank = schedule.placement[missing.stage]
    if way := DIRECTION.get(missing.op):
        for op, made in MAKES.items():
            compute = Action(op, missing.stage, missing.microbatch)
            if made is way and compute in places:
                return places[compute]
    return rank, len(schedule.actions[rank])


class _Execution:
    """Runs a complete schedule without data, under one of two models of a transfer."""

    def __init__(self, schedule: Schedule, flow: Flow, *, rendezvous: bool) -> None:
        self.schedule, self.flow, self.rendezvous = schedule, flow, rendezvous
        self.cursor = [0] * schedule.num_ranks
        self.made: set[tuple[Op, int, int]] = set()
        self.posted: set[Action] = set()
        self.arrived: set[Action] = set()  # receives whose value is there
        # What one end of a channel (sending rank, receiving rank, direction) posted before the other did.
        self.channels: defaultdict[tuple[int, int, Op], deque[tuple[Action, Place]]] = defaultdict(deque)

    def run(self) -> None:
        rows = self.schedule.actions
        before = -1
        while sum(self.cursor) > before:
            before = sum(self.cursor)
            for rank, row in enumerate(rows):
                while self.cursor[rank] < len(row) and self.step(rank):
                    self.cursor[rank] += 1
        stuck = [(rank, here) for rank, here in enumerate(self.cursor) if here < len(rows[rank])]
        if stuck:
            model = "transfers that block both sides" if self.rendezvous else "one channel per direction"
            waits = ", ".join(f"rank {rank} waits at {rows[rank][here]}" for rank, here in stuck)
            raise self.schedule.error(f"deadlock with {model}: {waits}", *stuck)

    def step(self, rank: int) -> bool:
        """Take the rank's next action; False when it has to wait."""
        here = rank, self.cursor[rank]
        action = self.schedule.actions[rank][here[1]]
        if action.op in COMPUTE:
            return self.compute(action, here)
        if action.op in DIRECTION:
            sends = action.op in SEND.values()
            if sends and (DIRECTION[action.op], action.stage, action.microbatch) not in self.made:
                raise self.schedule.error(f"rank {rank}: {action} comes before its value exists", here)
            return self.meet(action) if self.rendezvous else self.post(action, here)
        return True

    def compute(self, action: Action, here: Place) -> bool:
        for way, stage in self.flow.needs(action):
            if self.schedule.placement[stage] == here[0]:
                if (way, stage, action.microbatch) not in self.made:
                    needed = f"the {way.name.lower()} of stage {stage}"
                    raise self.schedule.error(f"rank {here[0]}: {action} comes before {needed}", here)
                continue
            receive = Action(RECEIVE[way], action.stage, action.microbatch, stage)
            if receive in self.arrived:
                continue
            if receive in self.posted:
                return False
            raise self.schedule.error(f"rank {here[0]}: {action} comes before {receive}", here)
        if action.op in MAKES:
            self.made.add((MAKES[action.op], action.stage, action.microbatch))
        return True

    def meet(self, action: Action) -> bool:
        """Blocking: the sender moves both ranks on, once the receiver is there too."""
        other = self.schedule.placement[action.peer]
        row, here = self.schedule.actions[other], self.cursor[other]
        if action.op in RECEIVE.values() or here == len(row) or row[here] != action.partner:
            return False
        self.arrived.add(action.partner)
        self.cursor[other] += 1
        return True

    def post(self, action: Action, here: Place) -> bool:
        """Not blocking: the n-th send of a channel meets its n-th receive."""
        self.posted.add(action)
        send, receive = (action, action.partner) if action.op in SEND.values() else (action.partner, action)
        placement = self.schedule.placement
        queue = self.channels[placement[send.stage], placement[receive.stage], DIRECTION[action.op]]
        if not queue or queue[0][0].op is action.op:
            queue.append((action, here))
            return True
        other, there = queue.popleft()
        if other != action.partner:
            problem = f"rank {here[0]}: {action} meets {other} of rank {there[0]}"
            raise self.schedule.error(problem, here, there)
        self.arrived.add(receive)
        return True


def _peak_live(schedule: Schedule, max_live: int | None) -> PeakLive:
    peaks: list[int] = []
    for rank, row in enumerate(schedule.actions):
        live = peak = 0
        for index, action in enumerate(row):
            live += (action.op is Op.FORWARD) - (action.op in RELEASES)
            peak = max(peak, live)
            if max_live is not None and live > max_live:
                problem = f"rank {rank}: {action} makes {live} activations live; the limit is {max_live}"
                raise schedule.error(problem, (rank, index))
        peaks.append(peak)
    return tuple(peaks)
