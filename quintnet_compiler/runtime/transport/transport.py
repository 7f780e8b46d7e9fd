"""What a rank program asks of the world around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .symmetric import Kernels

Wait = Callable[[], Tensor]  # blocks until a transfer is complete, and returns its tensor
Pending = Callable[[], Any]  # the same for a collective of a graph, which may make several

VALUES, GRADIENTS = 0, 1  # the two channels between stages


class Transport(Protocol):
    """Communication of one rank, by axis name. ``at`` is the number of the call's place in the program.

    Collectives return a new tensor of the conversion's result; ``dim`` and ``parts`` are those of ``S(dim, parts)``.
    """

    rank: int

    def run(self, collective: str, *args: Any) -> Any:
        """Carry out a collective of :data:`...ops.collectives.COLLECTIVES`, with the arguments of its operator but the
        size of the axis, and ``at``. ``gather_state`` gathers in the memory of ``x`` where that has room for the
        result; ``all_reduce_`` may add up there. Also ``exchange_rows(x, sends, receives, axis, at)``: to each rank of
        the axis its run of rows of ``x``, in order; returns what comes from each, in order (None: as many as there
        are, for shapes alone)."""
        ...

    def start(self, collective: str, *args: Any) -> Pending:
        """Begin what :meth:`run` carries out. What it reads must not change until it is waited
        for; it lives until then. Ranks must start collectives of an axis in the same order, and may wait in any."""
        ...

    def begin_gather(
        self, xs: Sequence[Tensor], axis: str, dims: Sequence[int], parts: Sequence[int], at: int
    ) -> tuple[tuple[Tensor, ...], Callable[[], Any]]:
        """Begin ``gather_states``: its results, which have no values before the function that comes with them has
        returned."""
        ...

    def permute(self, x: Tensor, axis: str, sources: tuple[int, ...], at: int) -> Wait:
        """Begin to replace ``x`` by that of another rank: the i-th of the axis gets what its ``sources[i]``-th has."""
        ...

    def kernels(self, axis: str, device: torch.device) -> Kernels | None:
        """Kernels that multiply what other ranks of the axis hold, if ``device`` has some for them."""
        ...

    def start_sum(self, x: Tensor, ranks: tuple[int, ...], label: str) -> Wait:
        """Begin to add up ``x`` over ``ranks`` in place."""
        ...

    def start_scatter(self, x: Tensor, ranks: tuple[int, ...], label: str) -> Wait:
        """Begin to add up the flat ``x`` over ``ranks`` in place, each rank its run of it: of as many equal runs as
        there are ranks, the one at its place among them. The others are lost."""
        ...

    def broadcast(self, x: Tensor, ranks: tuple[int, ...], source: int, label: str) -> Tensor:
        """``x`` of rank ``source``; elsewhere ``x`` gives the shape and is overwritten."""
        ...

    def send(self, x: Tensor, to: int, channel: int, label: str) -> Wait: ...
    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int, channel: int, label: str) -> Wait: ...
