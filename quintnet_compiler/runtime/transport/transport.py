"""The interface of a rank's communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

T = TypeVar("T")
Wait = Callable[[], Tensor]  # blocks until a transfer is complete, and returns its tensor
Pending = Callable[[], Any]  # the same for a collective of a graph, which may make several

VALUES, GRADIENTS = 0, 1  # the two channels between stages


class Transport(Protocol):
    """Communication of one rank, by axis name. ``at`` is the index of the call in the program.

    Collectives return a new tensor of the conversion's result; ``dim`` and ``parts`` are those of ``S(dim, parts)``.
    """

    rank: int

    def run(self, collective: str, *args: Any) -> Any:
        """Carry out a collective of :data:`...ops.collectives.COLLECTIVES`.

        ``args``: the arguments of its operator without the size of the axis, and ``at``. ``gather_state`` gathers in
        the memory of ``x`` if that has room for the result; ``all_reduce_`` may reduce in place.

        Another one is ``exchange_rows(x, sends, receives, axis, at)``: each rank of the axis is sent its run of rows of
        ``x``, in order; returns the rows from each rank, in order. Counts are None for shapes alone.
        """
        ...

    def start(self, collective: str, *args: Any) -> Pending:
        """Start what :meth:`run` carries out.

        Inputs live, and must not change, until the wait. Ranks must start collectives of an axis in the same order,
        and may wait for them in any order.
        """
        ...

    def begin_gather(
        self, xs: Sequence[Tensor], axis: str, dims: Sequence[int], parts: Sequence[int], at: int
    ) -> tuple[tuple[Tensor, ...], Callable[[], Any]]:
        """Start ``gather_states``; return its results, and what waits until they have values."""
        ...

    def permute(self, x: Tensor, axis: str, sources: tuple[int, ...], at: int) -> Wait:
        """Start a permutation: the i-th rank of the axis gets the ``x`` of its ``sources[i]``-th rank."""
        ...

    def kernels(self, axis: str, device: torch.device, create: Callable[[ProcessGroup, torch.device], T]) -> T | None:
        """Return the kernels that ``create`` returns for the ranks of ``axis``; None if they are no process group.

        It is called once for each device. Every rank of the axis must call this.
        """
        ...

    def start_sum(self, x: Tensor, ranks: tuple[int, ...], label: str) -> Wait:
        """Start an all-reduce of ``x`` over ``ranks``, in place."""
        ...

    def start_scatter(self, x: Tensor, ranks: tuple[int, ...], label: str) -> Wait:
        """Start a reduce-scatter of the flat ``x`` over ``ranks``, in place: each rank's run is at its old place.

        The runs are equally long, in the order of ``ranks``; those of other ranks are overwritten.
        """
        ...

    def broadcast(self, x: Tensor, ranks: tuple[int, ...], source: int, label: str) -> Tensor:
        """Return the ``x`` of rank ``source``; on other ranks ``x`` gives the shape, and is overwritten."""
        ...

    def send(self, x: Tensor, to: int, channel: int, label: str) -> Wait:
        """Start to send ``x`` to a rank."""
        ...

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, source: int, channel: int, label: str) -> Wait:
        """Start to receive a tensor from a rank."""
        ...
