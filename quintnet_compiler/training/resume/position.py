"""A position in an epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from xxhash import xxh3_64_intdigest

from ...compat.torch import pytree
from ...ir.batch_form import batch_size_of, plain_batch
from ...runtime.state.digests import sample, together

MAX_ELEMENTS = 2**12  # of each tensor of a batch that enter its digest


@dataclass(frozen=True)
class Position:
    """A position in an epoch.

    Attributes:
        epoch: The epoch's number.
        seen: Rows of all epochs so far.
        rows: Rows of this epoch; None if a checkpoint of an earlier version does not have it.
        batches: Batches of this epoch.
        digest: Of the values of these batches that are on the CPU, on this rank.
    """

    epoch: int = 0
    seen: int = 0
    rows: int | None = 0
    batches: int = 0
    digest: int = 0

    def after(self, batch: Any, ways: int) -> Position:
        """Return the position after ``batch``, if each of ``ways`` data ranks reads one."""
        rows = batch_size_of(batch) * ways
        tensors = [
            x for x in pytree.tree_leaves(plain_batch(batch)) if isinstance(x, Tensor) and x.device.type == "cpu"
        ]
        digest = together(self.digest, *map(_digest, tensors))
        return Position(self.epoch, self.seen + rows, (self.rows or 0) + rows, self.batches + 1, digest)

    def to_json(self) -> dict[str, Any]:
        """Return the part that all ranks have in common."""
        return {"epoch": self.epoch, "seen": self.seen, "rows": self.rows, "batches": self.batches}

    @classmethod
    def from_json(cls, stored: Mapping[str, Any], digest: int = 0) -> Position:
        """Return the position of :meth:`to_json`; earlier versions say ``in_epoch`` for ``batches``."""
        batches = stored["batches"] if "batches" in stored else stored["in_epoch"]
        return cls(stored["epoch"], stored["seen"], stored.get("rows"), batches, digest)

    def reaches(self, other: Position) -> bool:
        """Return whether at least as much of an epoch was read as at ``other``."""
        if other.rows is None:
            return self.batches >= other.batches
        return (self.rows or 0) >= other.rows


def _digest(x: Tensor) -> tuple[str, tuple[int, ...], int]:
    """Return a tensor's dtype, shape and a hash of some of its values; this takes microseconds per batch."""
    values = sample(torch.view_as_real(x.resolve_conj()) if x.is_complex() else x, MAX_ELEMENTS)
    data = values.detach().contiguous().view(-1).view(torch.uint8)
    return str(x.dtype), tuple(x.shape), xxh3_64_intdigest(data.numpy().tobytes())
