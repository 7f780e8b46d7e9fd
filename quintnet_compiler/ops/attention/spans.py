"""Calls of kernels that take runs of unequal lengths: each call has many spans of queries and keys, of which no query
and no key is in two."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from ...compat.torch_codegen import SHIPPED
from .blocks import AttentionSpan, Block
from .kernels import AttentionKernel, Lengths

Run: TypeAlias = tuple[int, int, int]  # a row of the batch, and a first place and an end in it
Where: TypeAlias = tuple[int | slice | Tensor, ...]  # an index of [rows, places, ...]


@dataclass(frozen=True)
class AttentionTerm:
    """The attention of queries ``at`` [rows, places] to some keys: [..., H, E], and the logs [..., H]; whether each of
    them sees a key (the log of one that does not is -inf)."""

    at: Where
    out: Tensor
    lse: Tensor
    seen: bool


@dataclass(frozen=True)
class Backward:
    """Inputs of the backward of a block: [B, heads, places, features], and the logs [B, H, S], of all keys."""

    grad: Tensor
    q: Tensor
    out: Tensor
    lse: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class RunPlaces:
    """Runs of places in [rows, heads, places, features], one after the other. What layers share is made once."""

    runs: tuple[Run, ...]
    _where: dict[tuple[object, ...], Where] = field(default_factory=dict, init=False, compare=False)
    _ends: dict[torch.device, Tensor] = field(default_factory=dict, init=False, compare=False)

    @cached_property
    def lengths(self) -> list[int]:
        return [end - first for _, first, end in self.runs]

    def where(self, like: Tensor) -> Where:
        """Return the index of the runs in ``like`` [rows, places, ...]: slices if no run leaves a gap to the next."""
        key = (*like.shape[:2], like.device)
        if key not in self._where:
            self._where[key] = self._slices(*like.shape[:2]) or self._indices(like.device)
        return self._where[key]

    def _slices(self, rows: int, length: int) -> Where | None:
        at = [(row * length + first, row * length + end) for row, first, end in self.runs]
        if all(end == first for (_, end), (first, _) in pairwise(at)):
            if self.runs[0][0] == self.runs[-1][0]:
                return self.runs[0][0], slice(self.runs[0][1], self.runs[-1][2])
            if (at[0][0], at[-1][1]) == (0, rows * length):
                return (slice(None),)
        return None

    def _indices(self, device: torch.device) -> Where:
        rows = [SHIPPED.full([end - first], row) for row, first, end in self.runs]
        places = [SHIPPED.arange(first, end) for _, first, end in self.runs]
        return tuple(SHIPPED.cat(x).to(device, non_blocking=True) for x in (rows, places))

    def taken(self, x: Tensor) -> Tensor:
        """Take the places of the runs, [places, heads, ...], from [rows, heads, places, ...]."""
        by_place = x.transpose(1, 2)
        taken = by_place[self.where(by_place)]
        return taken.flatten(0, 1) if taken.dim() == x.dim() else taken  # all rows

    def ends(self, device: torch.device) -> Tensor:
        """Return where each run ends among all, after a 0 (int32); the host does not wait for the copy."""
        if device not in self._ends:
            ends = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32)
            self._ends[device] = ends.to(device, non_blocking=True)
        return self._ends[device]


@dataclass(frozen=True)
class SpansCall:
    """A call: in these rows of the batch these queries see these keys."""

    queries: RunPlaces
    keys: RunPlaces
    left: int
    right: int

    def _operands(self, q: Tensor, k: Tensor, v: Tensor) -> Lengths:
        q, k, v = self.queries.taken(q), self.keys.taken(k), self.keys.taken(v)
        (q_ends, k_ends), (most_q, most_k) = (
            (x.ends(q.device) for x in (self.queries, self.keys)),
            (max(x.lengths) for x in (self.queries, self.keys)),
        )
        return Lengths(q, k, v, q_ends, k_ends, most_q, most_k, self.left, self.right)

    def forward(self, kernel: AttentionKernel, scale: float, q: Tensor, k: Tensor, v: Tensor) -> AttentionTerm:
        assert kernel.lengths is not None
        out, lse = kernel.lengths.forward(self._operands(q, k, v), scale)
        return AttentionTerm(self.queries.where(q.transpose(1, 2)), out, lse.T, True)

    def backward(self, kernel: AttentionKernel, scale: float, inputs: Backward) -> tuple[tuple[Where, Tensor], ...]:
        assert kernel.lengths is not None
        grad, out, lse = (self.queries.taken(x) for x in (inputs.grad, inputs.out, inputs.lse))
        runs = self._operands(inputs.q, inputs.k, inputs.v)
        gradients = kernel.lengths.backward(grad, out, lse.T.contiguous(), runs, scale)
        of_q, of_k = (x.where(like.transpose(1, 2)) for x, like in ((self.queries, inputs.q), (self.keys, inputs.k)))
        return tuple(zip((of_q, of_k, of_k), gradients, strict=True))


@dataclass
class _Call:
    """Spans whose queries and keys follow each other."""

    queries: list[Run] = field(default_factory=list)
    keys: list[Run] = field(default_factory=list)

    def takes(self, queries: Run, keys: Run) -> bool:
        return not self.queries or all(
            old[0] < new[0] or (old[0] == new[0] and old[2] <= new[1])
            for old, new in ((self.queries[-1], queries), (self.keys[-1], keys))
        )


@dataclass
class Calls:
    """Calls for parts of ``block``; no call has a query or a key twice."""

    block: Block
    _by_window: dict[tuple[int, int], list[_Call]] = field(default_factory=dict)

    def add(self, row: int, spans: Iterable[AttentionSpan]) -> None:
        for span in spans:
            queries, keys = ((row, at.start, at.stop) for at in self.block.slices_of(span.block))
            calls = self._by_window.setdefault((span.left, span.right), [])
            call = next((earlier for earlier in calls if earlier.takes(queries, keys)), None)
            if call is None:
                call = _Call()
                calls.append(call)
            call.queries.append(queries)
            call.keys.append(keys)

    @property
    def made(self) -> Sequence[SpansCall]:
        return [
            SpansCall(RunPlaces(tuple(call.queries)), RunPlaces(tuple(call.keys)), *window)
            for window, calls in self._by_window.items()
            for call in calls
        ]
