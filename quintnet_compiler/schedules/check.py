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
    flow = Flow.from_edges(edges, schedule.num_stages)
    _check_complete(schedule, flow)
    _Execution(schedule, flow, rendezvous=False).take_all_actions()
    if rendezvous:
        _Execution(schedule, flow, rendezvous=True).take_all_actions()
    return _peak_live(schedule, max_live)


def _check_complete(schedule: Schedule, flow: Flow) -> None:
    """Require every action of a complete schedule once, and no other."""
    places: dict[Action, Place] = {}
    for rank, row in enumerate(schedule.actions):
        for index, action in enumerate(row):
            place = rank, index
            if action in places:
                raise schedule.error(f"rank {rank}: {action} is there twice", places[action], place)
            if action.stage >= schedule.num_stages or action.microbatch >= schedule.num_microbatches:
                raise schedule.error(f"rank {rank}: {action} has no such stage or microbatch", place)
            if schedule.placement[action.stage] != rank:
                owner = schedule.placement[action.stage]
                raise schedule.error(f"rank {rank}: {action} belongs to rank {owner}", place)
            places[action] = place

    required = dict.fromkeys(_required(schedule, flow, places.keys()))
    for action, place in places.items():
        if action not in required:
            raise schedule.error(f"rank {place[0]}: no stage or edge asks for {action}", place)
    for action in required:
        if action not in places:
            place = _anchor(schedule, action, places)
            raise schedule.error(f"rank {place[0]}: {action} is missing", place)

    for action, (rank, index) in places.items():
        if action.op in RELEASES and index > places[Action(Op.REDUCE, action.stage)][1]:
            reduce = Action(Op.REDUCE, action.stage)
            raise schedule.error(f"rank {rank}: {reduce} comes before {action} is over", places[reduce])


def _required(schedule: Schedule, flow: Flow, present: Iterable[Action]) -> Iterator[Action]:
    """Yield all actions of a complete schedule; compute actions first, for they locate missing transfers."""
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
    """Return where to point when ``missing`` is: at the compute action that computes or uses a transfer's value."""
    rank = schedule.placement[missing.stage]
    if way := DIRECTION.get(missing.op):
        for op, direction in MAKES.items():
            compute = Action(op, missing.stage, missing.microbatch)
            if direction is way and compute in places:
                return places[compute]
    return rank, len(schedule.actions[rank])


class _Execution:
    """Runs a complete schedule without data, under one of two models of a transfer."""

    def __init__(self, schedule: Schedule, flow: Flow, *, rendezvous: bool) -> None:
        self.schedule, self.flow, self.rendezvous = schedule, flow, rendezvous
        self.cursor = [0] * schedule.num_ranks
        self.computed: set[tuple[Op, int, int]] = set()
        self.posted: set[Action] = set()
        self.arrived: set[Action] = set()  # receives whose value is there
        # What one end of a channel (sending rank, receiving rank, direction) posted before the other did.
        self.channels: defaultdict[tuple[int, int, Op], deque[tuple[Action, Place]]] = defaultdict(deque)

    def take_all_actions(self) -> None:
        """Take all actions.

        Raises:
            ScheduleError: QN208 if ranks wait for each other, or use what does not exist yet.
        """
        rows = self.schedule.actions
        previous = -1
        while sum(self.cursor) > previous:
            previous = sum(self.cursor)
            for rank, row in enumerate(rows):
                while self.cursor[rank] < len(row) and self.take_action(rank):
                    self.cursor[rank] += 1
        stuck = [(rank, index) for rank, index in enumerate(self.cursor) if index < len(rows[rank])]
        if stuck:
            model = "transfers that block both sides" if self.rendezvous else "one channel per direction"
            waits = ", ".join(f"rank {rank} waits at {rows[rank][index]}" for rank, index in stuck)
            raise self.schedule.error(f"deadlock with {model}: {waits}", *stuck)

    def take_action(self, rank: int) -> bool:
        """Take the rank's next action; False when it has to wait."""
        place = rank, self.cursor[rank]
        action = self.schedule.actions[rank][place[1]]
        if action.op in COMPUTE:
            return self.compute(action, place)
        if action.op in DIRECTION:
            sends = action.op in SEND.values()
            if sends and (DIRECTION[action.op], action.stage, action.microbatch) not in self.computed:
                raise self.schedule.error(f"rank {rank}: {action} comes before its value exists", place)
            return self.take_transfer(action) if self.rendezvous else self.post(action, place)
        return True

    def compute(self, action: Action, place: Place) -> bool:
        """Compute a value; False when a receive that was posted has not arrived."""
        for way, stage in self.flow.needs(action):
            if self.schedule.placement[stage] == place[0]:
                if (way, stage, action.microbatch) not in self.computed:
                    needed = f"the {way.name.lower()} of stage {stage}"
                    raise self.schedule.error(f"rank {place[0]}: {action} comes before {needed}", place)
                continue
            receive = Action(RECEIVE[way], action.stage, action.microbatch, stage)
            if receive in self.arrived:
                continue
            if receive in self.posted:
                return False
            raise self.schedule.error(f"rank {place[0]}: {action} comes before {receive}", place)
        if action.op in MAKES:
            self.computed.add((MAKES[action.op], action.stage, action.microbatch))
        return True

    def take_transfer(self, action: Action) -> bool:
        """Take a transfer that blocks: the sender moves both ranks on, once the receiver has come to it."""
        other = self.schedule.placement[action.peer]
        row, index = self.schedule.actions[other], self.cursor[other]
        if action.op in RECEIVE.values() or index == len(row) or row[index] != action.partner:
            return False
        self.arrived.add(action.partner)
        self.cursor[other] += 1
        return True

    def post(self, action: Action, place: Place) -> bool:
        """Take a transfer that does not block: the n-th send of a channel meets its n-th receive."""
        self.posted.add(action)
        send, receive = (action, action.partner) if action.op in SEND.values() else (action.partner, action)
        placement = self.schedule.placement
        queue = self.channels[placement[send.stage], placement[receive.stage], DIRECTION[action.op]]
        if not queue or queue[0][0].op is action.op:
            queue.append((action, place))
            return True
        other, other_place = queue.popleft()
        if other != action.partner:
            problem = f"rank {place[0]}: {action} meets {other} of rank {other_place[0]}"
            raise self.schedule.error(problem, place, other_place)
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
