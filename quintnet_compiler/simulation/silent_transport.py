"""The transport of a process without peers: its use of memory, on tensors without values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.mesh import Mesh
from ..runtime.transport.collectives import Native, pending
from ..runtime.transport.distributed import DistributedTransport
from ..runtime.transport.transport import Pending, Wait


class SilentGroup(Native):
    """Allocates what the backend of a process group does, and moves nothing."""

    def __init__(self, size: int, rank: int) -> None:
        self.size, self.rank = size, rank

    def add(self, x: Tensor, later: bool = True) -> Pending:
        return pending(None, x, lambda: x)

    def all_gather(self, x: Tensor, into: Tensor, later: bool) -> Pending:
        return pending(None, x, lambda: into)

    def reduce_scatter(self, x: Tensor, into: Tensor, later: bool) -> Pending:
        return pending(None, x, lambda: into)

    def all_gather_each(self, xs: Sequence[Tensor], into: Sequence[Tensor], later: bool) -> Pending:
        return pending(None, xs, lambda: into)

    def reduce_scatter_each(self, xs: Sequence[Tensor], into: Sequence[Tensor], later: bool) -> Pending:
        return pending(None, xs, lambda: into)

    def all_to_all(
        self, x: Tensor, into: Tensor, later: bool, receives: list[int] | None = None, sends: list[int] | None = None
    ) -> Pending:
        return pending(None, x, lambda: into)

    def permute(self, x: Tensor, sources: tuple[int, ...]) -> Pending:
        if sources[self.rank] == self.rank:
            return lambda: x
        received, sent = torch.empty_like(x), [x]

        def wait() -> Tensor:
            sent.clear()
            return received

        return wait


class SilentTransport(DistributedTransport):
    """The transport of ``rank``, with the code that processes run, and no process group."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.mesh, self.rank, self.place = mesh, rank, mesh.coordinate(rank)
        self.axis = {axis: SilentGroup(mesh[axis], self.place[axis]) for axis in mesh.names if mesh[axis] > 1}

    def kernels(self, axis: str, device: torch.device, create: object) -> None:
        return None

    def start_sum(self, x: Tensor, ranks: tuple[int, ...], label: str) -> Wait:
        return lambda: x

    def connect(self, connections: Any) -> None:
        """Do nothing."""
