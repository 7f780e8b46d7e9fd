"""The sends of a rank that have arrived for certain, so that their values can be freed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from .schedule import COMPUTE, RECEIVE, SEND, Action, Op, Schedule


def arrived_sends(schedule: Schedule, rank: int) -> Mapping[Action, tuple[Action, ...]]:
    """Return for compute actions of ``rank`` the sends that were used before what the action waits for was sent.

    So a wait for these sends costs nothing once the action's own values are there. The last few sends of a step are
    not among them.

    >>> from .schedule import chain, with_transfers
    >>> from .kinds import one_f_one_b
    >>> arrived = arrived_sends(with_transfers(one_f_one_b(2, 3), chain(2)), 0)
    >>> [(str(action), *map(str, sends)) for action, sends in arrived.items()]
    [('0B0', '0SF0>1'), ('0B1', '0SF1>1'), ('0B2', '0SF2>1')]
    """
    arrived: dict[Action, tuple[Action, ...]] = {}
    row = schedule.actions[rank]
    received = _users(row)
    others = {schedule.placement[action.peer] for action in row if action.op in SEND.values()}
    for other in sorted(others):
        positions = {action: index for index, action in enumerate(schedule.actions[other])}
        users = _users(schedule.actions[other])
        sent = [action for action in row if action.op in SEND.values() and action.partner in users]
        sends = sorted(((users[send.partner], send) for send in sent), key=lambda pair: pair[0])
        latest: dict[int, int] = {}
        for receive, index in received.items():
            if receive.partner in positions:
                latest[index] = max(latest.get(index, -1), positions[receive.partner])
        over = 0
        for index in sorted(latest):
            first = over
            while over < len(sends) and sends[over][0] < latest[index]:
                over += 1
            arrived[row[index]] = arrived.get(row[index], ()) + tuple(send for _, send in sends[first:over])
    return {action: sends for action, sends in arrived.items() if sends}


def _users(row: tuple[Action, ...]) -> dict[Action, int]:
    """Return for each receive of a rank the index of the compute action that waits for it."""
    waiting: dict[tuple[bool, int, int], list[Action]] = defaultdict(list)
    users: dict[Action, int] = {}
    for index, action in enumerate(row):
        if action.op in RECEIVE.values():
            waiting[action.op is Op.RECV_FORWARD, action.stage, action.microbatch].append(action)
        elif action.op in COMPUTE and action.op is not Op.BACKWARD_WEIGHT:
            key = action.op is Op.FORWARD, action.stage, action.microbatch
            users |= dict.fromkeys(waiting.pop(key, ()), index)
    return users
