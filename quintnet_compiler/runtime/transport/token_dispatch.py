"""Rows on their way to the ranks that hold their experts, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.mesh import Mesh
from .transport import Pending, Transport


class Router:
    """One rank's side. How many rows go where is only known now: ranks tell each other first, in the plan."""

    def __init__(self, transport: Transport, mesh: Mesh) -> None:
        self.transport, self.mesh = transport, mesh

    def dispatch_plan(self, ids: Tensor, axis: str, experts: int, outer: int, at: int) -> Tensor:
        """The order in which rows with the experts ``ids`` leave, how many go to each rank of the axis, and how many
        come from each. ``outer``: the ways in which axes before this one split the experts."""
        size = self.mesh[axis]
        if ids.is_meta:
            return ids.new_empty([ids.shape[0] + 2 * size], dtype=torch.int64)
        owner = ids.long() // (experts // (outer * size)) % size
        sends = torch.bincount(owner, minlength=size)
        receives = self.transport.run("exchange_rows", sends, [1] * size, [1] * size, axis, at)
        return torch.cat([owner.argsort(stable=True), sends, receives])

    def dispatch(self, x: Tensor, axis: str, plan: Tensor, at: int) -> Tensor:
        """The rows that belong to this rank, in the order of the ranks that they come from."""
        rows: Tensor = self.transport.run("exchange_rows", *self._outgoing(x, axis, plan), axis, at)
        return rows

    def start_dispatch(self, x: Tensor, axis: str, plan: Tensor, at: int) -> Pending:
        return self.transport.start("exchange_rows", *self._outgoing(x, axis, plan), axis, at)

    def combine(self, x: Tensor, axis: str, plan: Tensor, at: int) -> Tensor:
        """What became of a rank's own rows, in their order."""
        return self._in_order(
            self.transport.run("exchange_rows", *self._returning(x, axis, plan), axis, at), plan, axis
        )

    def start_combine(self, x: Tensor, axis: str, plan: Tensor, at: int) -> Pending:
        begun = self.transport.start("exchange_rows", *self._returning(x, axis, plan), axis, at)
        return lambda: self._in_order(begun(), plan, axis)

    def _outgoing(self, x: Tensor, axis: str, plan: Tensor) -> tuple[Tensor, list[int] | None, list[int] | None]:
        if x.is_meta:
            return x, None, None
        sends, receives = self._counts(plan, axis)
        return x[plan[: -2 * self.mesh[axis]]], sends, receives

    def _returning(self, x: Tensor, axis: str, plan: Tensor) -> tuple[Tensor, list[int] | None, list[int] | None]:
        if x.is_meta:
            return x, None, None
        sends, receives = self._counts(plan, axis)
        return x, receives, sends

    def _in_order(self, back: Tensor, plan: Tensor, axis: str) -> Tensor:
        return back if back.is_meta else torch.empty_like(back).index_copy_(0, plan[: -2 * self.mesh[axis]], back)

    def _counts(self, plan: Tensor, axis: str) -> tuple[list[int], list[int]]:
        size = self.mesh[axis]
        sends, receives = plan[-2 * size :].view(2, size).tolist()
        return sends, receives
