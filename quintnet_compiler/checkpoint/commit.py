"""How a checkpoint appears in its folder, and when others go.

It gets its name when every byte is stored. At every moment the folder has at least as many whole checkpoints as it had,
or as are to be kept. Only the holder of the folder's lock does this.
"""

from __future__ import annotations

from collections.abc import Mapping

from .folder import CheckpointFiles, CheckpointFolder
from .manifest import require_replaceable, whole, write_manifest
from .pieces import Digest


def place_to_write(folder: CheckpointFolder, step: int) -> CheckpointFiles:
    """Room for a checkpoint that is not whole yet.

    A whole checkpoint that a dead writer left without its name gets it, and what else it left is removed, unless it
    cannot be read.

    Raises:
        CheckpointError: QN603 if the one that would be replaced cannot be read: it may be whole.
    """
    for entry in folder.named():
        if entry.step == step:
            require_replaceable(entry)
    for entry in folder.leftovers():
        if whole(entry) and entry.step not in {other.step for other in folder.named()}:
            folder.publish(entry.files, entry.step)
        elif whole(entry) is not None:
            folder.remove(entry.files)
    return folder.new(step)


def commit(
    folder: CheckpointFolder, made: CheckpointFiles, step: int, files: Mapping[str, Digest], keep: int | None
) -> CheckpointFiles:
    """Write the manifest and give the checkpoint its name.

    One of the same step is replaced. Those of later steps are of a run that this one left: they are moved to a folder
    ``abandoned-01`` (02, ...), so that the newest step is always this run's. With ``keep``, see :func:`prune`.
    """
    write_manifest(made, step, files)
    later = [entry for entry in folder.named() if entry.step > step]
    if later:
        folder.set_aside(later)
    final = folder.publish(made, step)
    if keep is not None:
        prune(folder, step, keep)
    return final


def prune(folder: CheckpointFolder, newest: int, keep: int) -> None:
    """Keep the ``keep`` newest whole checkpoints up to step ``newest``, which was just written, and remove the others.

    Damaged ones do not count (files are missing, or have other sizes: contents are not read), and are removed when so
    many whole ones are there. Then go those, too, of abandoned runs that were not farther than this one. What cannot be
    read does not count, and stays.
    """
    there = folder.named()
    good = [entry for entry in there if entry.step == newest or whole(entry)][:keep]
    if len(good) < keep:
        return
    for entry in there:
        if entry not in good and whole(entry) is not None:
            folder.remove(entry.files)
    for aside in folder.abandoned():
        for entry in aside.named():
            if entry.step <= newest and whole(entry) is not None:
                aside.remove(entry.files)
        aside.remove_if_empty()
