"""Decide whether a run resumes from a folder of checkpoints, before anything is loaded."""

from __future__ import annotations

import os

from ...checkpoint.folder import CheckpointFolder
from ...checkpoint.manifest import available
from ...checkpoint.stores.places import folder_at
from ...core.errors import CheckpointError
from ...weights.files import shown


def goes_on(place: str | os.PathLike[str]) -> bool:
    """Return whether there is a checkpoint.

    A run that silently began anew would hide the checkpoints of an earlier one.

    Raises:
        CheckpointError: QN601 if there is none, but checkpoints that were set aside or that cannot be read.
    """
    folder = folder_at(place, "QN601")
    try:
        entries = available(folder)
        if not entries:
            _require_empty(folder)
    except OSError as error:
        raise CheckpointError("QN601", shown(f"{folder.path}: {error}"), fix="see the reason") from None
    return bool(entries)


def _require_empty(folder: CheckpointFolder) -> None:
    leftovers = [f"{shown(name)}, which is no folder" for name in folder.unusable()]
    for aside in folder.abandoned():
        leftovers += [f"{shown(str(aside.path))} with step {entry.step}" for entry in aside.named()]
    if leftovers:
        raise CheckpointError(
            "QN601",
            "\n  ".join([f"{shown(str(folder.path))} has no checkpoint to go on from, and", *leftovers[:10]]),
            fix="move the checkpoint to go on from into it; or move these away, or give another folder, to begin anew",
        )
