"""The process groups of sends between pipeline stages: one for each channel, pair of ranks, and direction.

NCCL carries out the transfers of a communicator in the order in which they were issued, in both directions, so two
directions or channels that share one can deadlock. It also creates a communicator at its first use, where both ranks
must arrive: a rank that posts a receive early would block there
(https://github.com/pytorch/pytorch/issues/108378). So every connection has a group of its two ranks, and all are made
in one order on all ranks before the first step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist

from ...compat.torch_codegen import SHIPPED
from ...core.mesh import Mesh
from ...schedules.schedule import SEND, Op, Schedule
from .groups import new_group
from .shared_memory import MemoryLink, link
from .transport import GRADIENTS, VALUES


class Connection(NamedTuple):
    """A connection from rank ``source`` to rank ``target``, for values or for gradients."""

    channel: int
    source: int
    target: int


def connections_of(schedule: Schedule, mesh: Mesh) -> list[Connection]:
    """Return the connections that the ranks of a mesh use under ``schedule``, in the order in which they are made.

    >>> from ...schedules.kinds import one_f_one_b
    >>> from ...schedules.schedule import chain, with_transfers
    >>> schedule = with_transfers(one_f_one_b(2, 2), chain(2))
    >>> [connection[1:] for connection in connections_of(schedule, Mesh(pp=2, tp=2))]
    [(0, 2), (1, 3), (2, 0), (3, 1)]
    """
    hops = {
        (VALUES if action.op is Op.SEND_FORWARD else GRADIENTS, stage, schedule.placement[action.peer])
        for stage, row in enumerate(schedule.actions)
        for action in row
        if action.op in SEND.values()
    }
    connections = set()
    for rank in range(mesh.size):
        coordinate = mesh.coordinate(rank)
        for channel, source, target in hops:
            if coordinate.get("pp", 0) == source:
                connections.add(Connection(channel, rank, mesh.rank({**coordinate, "pp": target})))
    return sorted(connections)


class Connections:
    """The connections of one rank."""

    def __init__(self) -> None:
        """Begin without connections."""
        self.rank = dist.get_rank()
        self.added: set[Connection] = set()  # of all ranks
        self.group: dict[Connection, dist.ProcessGroup] = {}
        self.link: dict[Connection, MemoryLink | None] = {}  # of processes of one host

    def add(self, connections: Iterable[Connection], device: torch.device) -> None:
        """Connect these, for tensors on ``device``. Every rank must call this with the same ones in the same order."""
        for connection in connections:
            if connection in self.added:
                continue
            self.added.add(connection)
            group = new_group([connection.source, connection.target])
            if self.rank in (connection.source, connection.target):
                self.group[connection] = group
                self._connect(connection, device)
                self.link[connection] = link(group, both=False) if dist.get_backend(group) == "gloo" else None

    def _connect(self, connection: Connection, device: torch.device) -> None:
        first = SHIPPED.zeros(1, device=device)
        if self.rank == connection.source:
            work = dist.isend(first, connection.target, group=self.group[connection])
        else:
            work = dist.irecv(first, connection.source, group=self.group[connection])
        if work is not None:
            work.wait()
