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

    def all_reduce(self, x: Tensor, axis: str, at: int) -> Tensor: ...
    def all_gather(self, x: Tensor, axis: str, dim: int, parts: int, at: int) -> Tensor: ...
    def gather_state(self, x: Tensor, axis: str, dim: int, parts: int, at: int) -> Tensor:
        """As ``all_gather``. Where the memory of ``x`` has room for the result, it is gathered there."""
        ...

    def reduce_scatter(self, x: Tensor, axis: str, dim: int, parts: int, at: int) -> Tensor: ...
    def gather_together(
        self, xs: Sequence[Tensor], axis: str, dims: Sequence[int], parts: Sequence[int], at: int
    ) -> tuple[Tensor, ...]:
        """As ``all_gather`` of each, in one message."""
        ...

    def scatter_together(
        self, xs: Sequence[Tensor], axis: str, dims: Sequence[int], parts: Sequence[int], at: int
    ) -> tuple[Tensor, ...]:
        """As ``reduce_scatter`` of each, in one message."""
        ...

    def all_to_all(self, x: Tensor, axis: str, dim: int, parts: int, to_dim: int, to_parts: int, at: int) -> Tensor: ...

    def exchange_rows(
        self, x: Tensor, sends: list[int] | None, receives: list[int] | None, axis: str, at: int
    ) -> Tensor:
        """To each rank of the axis its run of rows of ``x``, in order; returns what comes from each, in order. None:
        as many as there are (for shapes alone)."""
        ...

    def start(self, collective: str, *args: Any) -> Pending:
        """Begin one of the collectives above, which takes ``args``. What it reads must not change until it is waited
        for; it lives until then. Ranks must start collectives of an axis in the same order, and may wait in any."""
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
