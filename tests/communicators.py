"""Whether a schedule's transfers can wait for each other forever on NCCL: a model of hosts, streams and communicators.

A host issues its actions in order. A transfer runs on the stream of its communicator, in the order of issue, once the
compute that was issued before it is done, and ends when both sides are there. A communicator that was not made before
is made at its first use, at which both hosts must arrive. A host may also wait for the compute that it issued before
it goes on (an ``.item()``, a ``.tolist()``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from quintnet_compiler.schedules.schedule import COMPUTE, MAKES, RECEIVE, SEND, Action, Op, Schedule

Name = Callable[[int, int, int], Hashable]  # (channel, source, target) -> the communicator


@dataclass(frozen=True)
class Communicators:
    """``name``: which transfers share one. ``made``: whether all are made before the first step."""

    name: Name
    made: bool


MODES: Mapping[str, Communicators] = MappingProxyType(
    {
        # a group of two ranks for each way, connected before the first step, as links.py does
        "links": Communicators(lambda channel, source, target: (channel, source, target), made=True),
        # the same, if nothing had connected them
        "links at first use": Communicators(lambda channel, source, target: (channel, source, target), made=False),
        # one group of all ranks for each channel and direction, with ``device_id=``: one communicator for each
        "channels": Communicators(lambda channel, source, target: (channel, source < target), made=True),
    }
)


@dataclass
class _Rank:
    actions: tuple[Action, ...]
    next: int = 0  # of its actions, the one at which the host stands
    issued: list[Action] = field(default_factory=list)  # compute
    done: int = 0  # of the issued
    arrived: set[Action] = field(default_factory=set)  # receives


@dataclass(frozen=True)
class _Transfer:
    action: Action
    key: tuple[int, int, int]
    after: int  # how much compute was issued before it


def stuck(schedule: Schedule, communicators: Communicators, *, waits: bool) -> list[str]:
    """Where the hosts stand that never end; ``waits``: whether they wait for their compute."""
    place = schedule.placement
    ranks = [_Rank(row) for row in schedule.actions]
    streams: dict[tuple[int, Hashable], list[_Transfer]] = defaultdict(list)
    made: set[Hashable] = set()
    meeting: dict[int, Hashable] = {}

    def key_of(me: int, action: Action) -> tuple[int, int, int]:
        other, channel = place[action.peer], int(action.op in (Op.SEND_BACKWARD, Op.RECV_BACKWARD))
        return (channel, me, other) if action.op in SEND.values() else (channel, other, me)

    def issue(me: int) -> bool:
        rank = ranks[me]
        if rank.next == len(rank.actions) or (waits and rank.done < len(rank.issued)):
            return False
        action = rank.actions[rank.next]
        if action.op in SEND.values() or action.op in RECEIVE.values():
            key = key_of(me, action)
            name = communicators.name(*key)
            if not communicators.made and name not in made:
                if meeting.get(place[action.peer]) != name:
                    meeting[me] = name
                    return False
                made.add(name)
            meeting.pop(me, None)
            streams[me, name].append(_Transfer(action, key, len(rank.issued)))
        elif action.op in COMPUTE:
            rank.issued.append(action)
        rank.next += 1
        return True

    def compute(me: int) -> bool:
        rank = ranks[me]
        if rank.done == len(rank.issued):
            return False
        action = rank.issued[rank.done]
        way = RECEIVE[MAKES[action.op]] if action.op in MAKES else None
        needed = (a for a in rank.actions if (a.op, a.stage, a.microbatch) == (way, action.stage, action.microbatch))
        if not rank.arrived.issuperset(needed):
            return False
        rank.done += 1
        return True

    def transfer(me: int, name: Hashable) -> bool:
        queue = streams[me, name]
        if not queue or queue[0].action.op not in SEND.values() or ranks[me].done < queue[0].after:
            return False
        other = queue[0].key[2]
        heads = streams.get((other, name), [])
        if not heads or heads[0].action != queue[0].action.partner or ranks[other].done < heads[0].after:
            return False
        ranks[other].arrived.add(heads.pop(0).action)
        queue.pop(0)
        return True

    moved = True
    while moved:
        moved = False
        for me in range(len(ranks)):
            while issue(me) or compute(me):
                moved = True
        for me, name in list(streams):
            while transfer(me, name):
                moved = True
    return [
        f"rank {me} at {rank.actions[rank.next] if rank.next < len(rank.actions) else 'its end'}"
        for me, rank in enumerate(ranks)
        if rank.next < len(rank.actions)
        or rank.done < len(rank.issued)
        or any(streams[k] for k in streams if k[0] == me)
    ]
