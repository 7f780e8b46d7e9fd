"""Rows on their way to the ranks that hold their experts, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.mesh import Mesh
from ...ops.experts.grouped_rows import sort_into
from .transport import Pending, Transport

Sizes = list[int] | None


class Router:
    """One rank's side. How many rows go where is only known now: ranks tell each other first, in the plan, and the host
    waits for that once. All that travels by the plan, forward and backward, takes its sizes from there."""

    def __init__(self, transport: Transport, mesh: Mesh) -> None:
        self.transport, self.mesh = transport, mesh

    def dispatch_plan(
        self, ids: Tensor, axis: str, experts: int, outer: int, hot: Sequence[int], at: int
    ) -> tuple[Tensor, Tensor]:
        """The order in which rows with the experts ``ids`` leave, and their counts on the host: how many go to each
        rank of the axis and how many come from each, by expert. ``outer``: the ways in which axes before this one
        split the experts. Rows of ``hot`` experts stay here, and those of no expert go to the last rank."""
        size = self.mesh[axis]
        group = experts // outer
        own = -(-group // size)
        width = own + len(hot) + 1
        if ids.is_meta:
            return ids.new_empty(ids.shape, dtype=torch.int64), ids.new_empty([2, size, width], dtype=torch.int64)
        local = ids.long() % group
        bins = torch.where((ids >= 0) & (ids < experts), local + local // own * (width - own), size * width - 1)
        for place, expert in enumerate(hot, self.mesh.coordinate(self.transport.rank)[axis] * width + own):
            bins = bins.masked_fill(ids == expert, place)
        order, ends = sort_into(bins, size * width)
        sends = torch.diff(ends.long(), prepend=ends.new_zeros(1, dtype=torch.int64)).view(size, width)
        receives = self.transport.run("exchange_rows", sends, [1] * size, [1] * size, axis, at)
        return order, torch.stack([sends, receives]).cpu()

    def dispatch(self, x: Tensor, axis: str, order: Tensor, counts: Tensor, at: int) -> Tensor:
        """The rows that belong to this rank, in the order of the ranks that they come from."""
        rows: Tensor = self.transport.run("exchange_rows", *_outgoing(x, order, counts), axis, at)
        return rows

    def start_dispatch(self, x: Tensor, axis: str, order: Tensor, counts: Tensor, at: int) -> Pending:
        return self.transport.start("exchange_rows", *_outgoing(x, order, counts), axis, at)

    def combine(self, x: Tensor, axis: str, order: Tensor, counts: Tensor, at: int) -> Tensor:
        """What became of a rank's own rows, in their order."""
        return _in_order(self.transport.run("exchange_rows", *_returning(x, counts), axis, at), order)

    def start_combine(self, x: Tensor, axis: str, order: Tensor, counts: Tensor, at: int) -> Pending:
        begun = self.transport.start("exchange_rows", *_returning(x, counts), axis, at)
        return lambda: _in_order(begun(), order)


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
    return back if back.is_meta else torch.empty_like(back).index_copy_(0, order, back)


def _sizes(counts: Tensor) -> tuple[list[int], list[int]]:
    sends, receives = counts.sum(-1).tolist()
    return sends, receives
