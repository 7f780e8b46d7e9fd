"""Send runs of positions to the ranks that compute attention for them, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

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
        here, size = self.coordinate[axis], self.mesh[axis]
        held: list[list[int]] = [] if x.is_meta or plan.is_meta else plan.tolist()
        homes = {run: run // len(runs) for runs in held for run in runs}
        owners = {run: rank for rank, runs in enumerate(held) for run in runs}
        if homes == owners:  # all stay, or nothing has values
            return lambda: x.clone(memory_format=torch.contiguous_format)
        own = [run for run, rank in sorted(homes.items()) if rank == here]
        (have, goes), (wanted, comes) = (own, owners), (held[here], homes)
        if home:
            (have, goes), (wanted, comes) = (wanted, comes), (have, goes)
        parts = dict(zip(have, x.chunk(len(have), dim), strict=True))
        leaving, arriving = _by_rank(have, goes, here), _by_rank(wanted, comes, here)
        outgoing = torch.stack([parts[run] for run in leaving]) if leaving else x.new_empty([0, *parts[have[0]].shape])
        sends, receives = ([[ranks[run] for run in runs].count(rank) for rank in range(size)]
                           for runs, ranks in ((leaving, goes), (arriving, comes)))  # fmt: skip
        begun = self.transport.start("exchange_rows", outgoing, sends, receives, axis, at)

        def joined() -> Tensor:
            there = parts | dict(zip(arriving, begun(), strict=True))
            return torch.cat([there[run] for run in wanted], dim)

        return joined


def _by_rank(runs: Sequence[int], ranks: Mapping[int, int], here: int) -> list[int]:
    """Return the runs of other ranks, in the order of ranks and then of positions."""
    return sorted((run for run in runs if ranks[run] != here), key=lambda run: (ranks[run], run))
