"""Send rows to the ranks that hold their experts, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...compat.torch_codegen import SHIPPED
from ...core.mesh import Mesh
from ...ops.experts.grouped_rows import sort_into
from .transport import Pending, Transport

Sizes = list[int] | None


class Router:
    """One rank's dispatch of rows to experts.

    The numbers of rows depend on values: :meth:`dispatch_plan` exchanges them, and synchronizes with the host once. All
    exchanges by that plan, forward and backward, take their sizes from it.
    """

    def __init__(self, transport: Transport, mesh: Mesh) -> None:
        """Exchange over the axes of ``mesh``."""
        self.transport, self.mesh = transport, mesh

    def dispatch_plan(
        self, ids: Tensor, axis: str, experts: int, outer: int, hot: Sequence[int], at: int
    ) -> tuple[Tensor, Tensor]:
        """Return the order in which rows with the experts ``ids`` are sent, and counts [2, ranks, experts] on the host.

        The counts say how many rows go to each rank of the axis and come from it, by expert. ``outer``: the number of
        parts into which earlier axes split the experts. Rows of ``hot`` experts stay on this rank, and those of no
        expert go to the last one.
        """
        size = self.mesh[axis]
        group = experts // outer
        num_local = -(-group // size)
        width = num_local + len(hot) + 1
        if ids.is_meta:
            return ids.new_empty(ids.shape, dtype=torch.int64), ids.new_empty([2, size, width], dtype=torch.int64)
        local = ids.long() % group
        bins = SHIPPED.where(
            (ids >= 0) & (ids < experts), local + local // num_local * (width - num_local), size * width - 1
        )
        for bin_, expert in enumerate(hot, self.mesh.coordinate(self.transport.rank)[axis] * width + num_local):
            bins = bins.masked_fill(ids == expert, bin_)
        order, ends = sort_into(bins, size * width)
        sends = SHIPPED.diff(ends.long(), prepend=ends.new_zeros(1, dtype=torch.int64)).view(size, width)
        receives = self.transport.run("exchange_rows", sends, [1] * size, [1] * size, axis, at)
        return order, SHIPPED.stack([sends, receives]).cpu()

    def dispatch(self, x: Tensor, axis: str, order: Tensor, counts: Tensor, at: int) -> Tensor:
        """Return the rows of this rank's experts, in the order of the ranks that they come from."""
        rows: Tensor = self.transport.run("exchange_rows", *_outgoing(x, order, counts), axis, at)
        return rows

    def start_dispatch(self, x: Tensor, axis: str, order: Tensor, counts: Tensor, at: int) -> Pending:
        """Start :meth:`dispatch`."""
        return self.transport.start("exchange_rows", *_outgoing(x, order, counts), axis, at)

    def combine(self, x: Tensor, axis: str, order: Tensor, counts: Tensor, at: int) -> Tensor:
        """Return the results for this rank's own rows, in their order."""
        return _in_order(self.transport.run("exchange_rows", *_returning(x, counts), axis, at), order)

    def start_combine(self, x: Tensor, axis: str, order: Tensor, counts: Tensor, at: int) -> Pending:
        """Start :meth:`combine`."""
        pending = self.transport.start("exchange_rows", *_returning(x, counts), axis, at)
        return lambda: _in_order(pending(), order)


def _outgoing(x: Tensor, order: Tensor, counts: Tensor) -> tuple[Tensor, Sizes, Sizes]:
    if x.is_meta:
        return x, None, None
    sends, receives = _sizes(counts)
    return x.index_select(0, order), sends, receives


def _returning(x: Tensor, counts: Tensor) -> tuple[Tensor, Sizes, Sizes]:
    if x.is_meta:
        return x, None, None
    sends, receives = _sizes(counts)
    return x, receives, sends


def _in_order(back: Tensor, order: Tensor) -> Tensor:
    return back if back.is_meta else SHIPPED.empty_like(back).index_copy_(0, order, back)


def _sizes(counts: Tensor) -> tuple[list[int], list[int]]:
    sends, receives = counts.sum(-1).tolist()
    return sends, receives
