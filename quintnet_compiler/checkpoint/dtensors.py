"""DTensors in the formats of torch.distributed.checkpoint."""

from __future__ import annotations

from collections.abc import Iterable

from torch.distributed.tensor import DTensor

from ..compat.distributed import checkpoint_parts_by, is_interleaved, local_tensor, positions_of
from ..core.sharding import Shard
from ..ir.distributed_program import StateSpec
from .parts import SavedPart


def interleaved_part(x: DTensor) -> SavedPart | None:
    """Return this rank's part if it may be several boxes (a packed weight's interleaved slices), else None."""
    return SavedPart.of(local_tensor(x), x.shape, positions_of(x)) if is_interleaved(x) else None


def know_all_boxes(stored: Iterable[StateSpec]) -> None:
    """From now on, torch.distributed.checkpoint reads and writes all boxes of DTensors in interleaved slices, or in
    whole units, if there are such among what is ``stored`` on ranks."""
    kinds = {kind for spec in stored for kind in spec.sharding if isinstance(kind, Shard)}
    if any(kind.parts > 1 or kind.unit > 1 for kind in kinds):
        checkpoint_parts_by(interleaved_part)
