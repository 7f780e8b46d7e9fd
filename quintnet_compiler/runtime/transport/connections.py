"""The process groups over which stages of a pipeline send: one for each channel, pair of ranks, and direction.

NCCL carries out all transfers of a communicator in the order in which they were issued, whichever way they go, so two
directions or channels that share one can wait for each other forever. And it makes communicators when they are first
used, where both hosts must arrive: a rank that posts a receive early would wait there for one that waits elsewhere
(https://github.com/pytorch/pytorch/issues/108378). So every connection has a group of its two ranks, and all are made
in one order on all ranks before the first step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist

from ...core.mesh import Mesh
from ...schedules.schedule import SEND, Op, Schedule
from .groups import new_group
from .shared_memory import MemoryLink, link
from .transport import GRADIENTS, VALUES


class Connection(NamedTuple):
    """One way from rank ``source`` to rank ``target``, for values or for gradients."""

    channel: int
    source: int
    target: int


def connections_of(schedule: Schedule, mesh: Mesh) -> list[Connection]:
    """All that the ranks of a mesh use under ``schedule``, in the order in which they are connected.

    >>> from ...schedules.kinds import one_f_one_b
    >>> from ...schedules.schedule import chain, with_transfers
    >>> schedule = with_transfers(one_f_one_b(2, 2), chain(2))
    >>> [(one.source, one.target) for one in connections_of(schedule, Mesh(pp=2, tp=2))]
    [(0, 2), (1, 3), (2, 0), (3, 1)]
    """
    ways = {
        (VALUES if action.op is Op.SEND_FORWARD else GRADIENTS, place, schedule.placement[action.peer])
        for place, row in enumerate(schedule.actions)
        for action in row
        if action.op in SEND.values()
    }
    found = set()
    for rank in range(mesh.size):
        here = mesh.coordinate(rank)
        for channel, source, target in ways:
            if here.get("pp", 0) == source:
                found.add(Connection(channel, rank, mesh.rank({**here, "pp": target})))
    return sorted(found)


class Connections:
    """Those of one rank."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.known: set[Connection] = set()
        self.group: dict[Connection, dist.ProcessGroup] = {}
        self.link: dict[Connection, MemoryLink | None] = {}  # of processes of one host

    def add(self, connections: Iterable[Connection], device: torch.device) -> None:
        """Connect these, for tensors on ``device``. Every rank must call this with the same ones in the same order."""
        for one in connections:
            if one in self.known:
                continue
            self.known.add(one)
            group = new_group([one.source, one.target])
            if self.rank in (one.source, one.target):
                self.group[one] = group
                self._connect(one, device)
                self.link[one] = link(group, both=False) if dist.get_backend(group) == "gloo" else None

    def _connect(self, one: Connection, device: torch.device) -> None:
        first = torch.zeros(1, device=device)
        if self.rank == one.source:
            work = dist.isend(first, one.target, group=self.group[one])
        else:
            work = dist.irecv(first, one.source, group=self.group[one])
        if work is not None:
            work.wait()
