"""How a checkpoint appears in its folder, and when others go.

It gets its name when every byte is stored, and before another loses its own. At every moment the folder has at least as
many whole checkpoints as it had, or as are to be kept. Only the holder of the folder's lock does this.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping

from .folder import CheckpointFiles, CheckpointFolder, PublishedError
from .manifest import is_named, of_this_run, require_replaceable, whole, write_manifest
from .pieces import Digest


def place_to_write(folder: CheckpointFolder, step: int) -> CheckpointFiles:
    """Room for a checkpoint that is not whole yet.

    What a dead writer had begun is finished: checkpoints that its run left are set aside, a whole one without a name
    gets it, and what else it left is removed, unless it cannot be read.

    Raises:
        CheckpointError: QN603 if the one that would be replaced cannot be read: it may be whole.
    """
    for entry in folder.named():
        if entry.step == step:
            require_replaceable(entry)
    _finish_leaving(folder)
    for entry in folder.leftovers():
        is_whole = whole(entry)
        if is_whole and entry.step not in {other.step for other in folder.named()}:
            folder.publish(entry.files, entry.step)
        elif is_whole is not None:
            folder.remove(entry.files)
    return folder.new(step)


def commit(
    folder: CheckpointFolder, checkpoint: CheckpointFiles, step: int, files: Mapping[str, Digest], keep: int | None
) -> CheckpointFiles:
    """Write the manifest and give the checkpoint its name.

    One of the same step is replaced. Those of later steps are of a run that this one left: they are moved to a folder
    ``abandoned-01`` (02, ...), so that the newest step is always this run's. A mark says so from before the checkpoint
    gets its name until all are moved: see :func:`.manifest.of_this_run`. With ``keep``, see :func:`prune`.

    Raises:
        PublishedError: if something failed when the checkpoint had its name. After any other error it does not have it,
            and the folder's others are as they were.
    """
    digest = write_manifest(checkpoint, step, files)
    later = [entry for entry in folder.named() if entry.step > step]
    if later:
        folder.write_mark(json.dumps({"step": step, "sha256": digest}))
    try:
        final = folder.publish(checkpoint, step)
    except PublishedError:
        raise
    except BaseException as error:  # Ctrl+C, too
        try:
            named = is_named(folder, step, digest)
        except Exception:  # the disk is gone; the mark has to stay
            raise PublishedError.because_of(error, certain=False) from error
        if named:
            raise PublishedError.because_of(error) from error
        with contextlib.suppress(Exception):  # it says nothing without the checkpoint
            folder.remove_mark()
        raise
    with PublishedError.instead():
        if later:
            folder.set_aside(later)
            folder.remove_mark()
        if keep is not None:
            prune(folder, step, keep)
    return final


def _finish_leaving(folder: CheckpointFolder) -> None:
    """Set aside what the mark is of, and remove the mark."""
    if folder.read_mark():
        there = folder.named()
        kept = of_this_run(folder, there)
        left = [entry for entry in there if entry not in kept]
        if left:
            folder.set_aside(left)
    folder.remove_mark()


def prune(folder: CheckpointFolder, newest: int, keep: int) -> None:
    """Keep the ``keep`` newest whole checkpoints up to step ``newest``, which was just written, and remove the others.

    Damaged ones do not count (files are missing, or have other sizes: contents are not read), and are removed when so
    many whole ones are there. Then go those, too, of abandoned runs that were not farther than this one. What cannot be
    read does not count, and stays.
    """
    there = [entry for entry in folder.named() if entry.step <= newest]
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
