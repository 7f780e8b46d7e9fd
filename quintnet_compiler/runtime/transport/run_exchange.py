"""Send runs of positions to the ranks that compute attention for them, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ...compat.torch_codegen import SHIPPED
from ...core.mesh import Mesh
from .transport import Pending, Transport


class RunExchange:
    """One rank's exchange of runs.

    Every rank has the plan (:mod:`...ops.attention.ring_plan`) of the runs that each rank computes, so that sizes need
    not be exchanged. Where all runs stay, there is no communication.
    """

    def __init__(self, transport: Transport, mesh: Mesh, coordinate: Mapping[str, int]) -> None:
        """Exchange over the axes of ``mesh``, as the rank at ``coordinate``."""
        self.transport, self.mesh, self.coordinate = transport, mesh, coordinate

    def send_runs(self, x: Tensor, axis: str, dim: int, plan: Tensor, at: int) -> Tensor:
        """Return the runs of ``dim`` that this rank computes, from all ranks of the axis."""
        runs: Tensor = self.start_send_runs(x, axis, dim, plan, at)()
        return runs

    def start_send_runs(self, x: Tensor, axis: str, dim: int, plan: Tensor, at: int) -> Pending:
        """Start :meth:`send_runs`."""
        return self._start(x, axis, dim, plan, at, home=False)

    def return_runs(self, x: Tensor, axis: str, dim: int, plan: Tensor, at: int) -> Tensor:
        """Return the results for this rank's own runs, in their order, from the ranks that computed them."""
        runs: Tensor = self.start_return_runs(x, axis, dim, plan, at)()
        return runs

    def start_return_runs(self, x: Tensor, axis: str, dim: int, plan: Tensor, at: int) -> Pending:
        """Start :meth:`return_runs`."""
        return self._start(x, axis, dim, plan, at, home=True)

    def _start(self, x: Tensor, axis: str, dim: int, plan: Tensor, at: int, *, home: bool) -> Pending:
        rank, size = self.coordinate[axis], self.mesh[axis]
        assigned: list[list[int]] = [] if x.is_meta or plan.is_meta else plan.tolist()
        homes = {run: run // len(runs) for runs in assigned for run in runs}
        owners = {run: owner for owner, runs in enumerate(assigned) for run in runs}
        if homes == owners:  # all stay, or nothing has values
            return lambda: x.clone(memory_format=torch.contiguous_format)
        stored = [run for run, owner in sorted(homes.items()) if owner == rank]
        source, target = _Side(stored, owners), _Side(assigned[rank], homes)
        if home:
            source, target = target, source
        leaving, arriving = source.exchanged(rank), target.exchanged(rank)
        parts = dict(zip(source.runs, x.chunk(len(source.runs), dim), strict=True))
        outgoing = [parts[run] for run in leaving]
        rows = SHIPPED.stack(outgoing) if outgoing else x.new_empty([0, *parts[source.runs[0]].shape])
        sends, receives = source.counts(leaving, size), target.counts(arriving, size)
        wait = self.transport.start("exchange_rows", rows, sends, receives, axis, at)

        def joined() -> Tensor:
            runs = parts | dict(zip(arriving, wait(), strict=True))
            return SHIPPED.cat([runs[run] for run in target.runs], dim)

        return joined


class _Side(NamedTuple):
    """Runs of a rank, on one side of an exchange, and the rank of each run on the other side."""

    runs: Sequence[int]
    peers: Mapping[int, int]

    def exchanged(self, rank: int) -> list[int]:
        """Return the runs with another peer than ``rank``, in the order of peers and then of positions."""
        return sorted((run for run in self.runs if self.peers[run] != rank), key=lambda run: (self.peers[run], run))

    def counts(self, runs: Sequence[int], size: int) -> list[int]:
        """Return how many of ``runs`` each rank exchanges."""
        peers = [self.peers[run] for run in runs]
        return [peers.count(rank) for rank in range(size)]
