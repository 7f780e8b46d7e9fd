"""What one rank can save alone: all that training needs to go on, if it has all of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..core.errors import CheckpointError
from ..runtime.state.whole_optimizer import WholeOptimizer
from .pretrained import WeightsSubject
from .training_state import MODEL, Snapshot, snapshot_here


def replica(
    subject: WeightsSubject, optimizer: torch.optim.Optimizer | None, extra: Mapping[str, Any], run: Mapping[str, Any]
) -> Snapshot | None:
    """Return a snapshot of this rank's own tensors, without a word from others; None if some are split or elsewhere.

    They are a whole state of the run by themselves: what each rank does to a replica is the same, so nobody has to know
    which step the others have finished.
    """
    if isinstance(optimizer, WholeOptimizer):
        return None  # each rank keeps the state of some parameters
    if optimizer is not None:
        mine = [bool(optimizer.state.get(p)) for group in optimizer.param_groups for p in group["params"]]
        if any(mine) and not all(mine):  # a replica has all, or those of such an optimizer have none
            return None
    try:
        own = snapshot_here(subject, optimizer, extra, run)
    except CheckpointError:
        return None
    needed = {f"{MODEL}{spec.name}" for spec in subject.program.state.values() if spec.kind == "parameter"}
    whole = all(part.local.shape == part.shape for part in own.parts.values())
    return own if whole and needed <= own.parts.keys() else None
