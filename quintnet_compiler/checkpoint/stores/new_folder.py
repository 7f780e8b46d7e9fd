"""Folders of weights and converted checkpoints, which appear when they are complete."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from ...core.errors import CheckpointError
from ...weights.files import shown
from ..documents import is_checkpoint
from ..reading.together import TellAll, alone, raised_together


@contextlib.contextmanager
def new_folder(folder: Path, tell_all: TellAll = alone, *, writes: bool = True) -> Iterator[Path]:
    """Yield a folder to write, which becomes ``folder`` when the block ends without an error.

    Args:
        folder: is not there yet, or is empty.
        tell_all: gives every rank's text to every rank.
        writes: whether this rank makes it; others take part in the block.

    Raises:
        CheckpointError: QN603 on every rank if it cannot be written, and what the block raises on one.
    """
    head = f".{folder.name[:40]}."  # the name has at most 255 bytes
    temporary = folder.parent / f"{head}{secrets.token_hex(8)}.tmp"
    try:
        with raised_together(tell_all, "QN603"):
            if writes:
                _make(folder, temporary)
        with raised_together(tell_all, "QN603"):
            yield temporary
            if writes:
                os.rename(temporary, folder)
    except CheckpointError as error:
        if error.code != "QN603":
            raise
        text = re.sub(rf"{re.escape(shown(head))}[0-9a-f]{{16}}\.tmp", lambda _: shown(folder.name), error.message)
        if writes and not _remove(temporary):
            text += f"; a part is left in {shown(str(temporary))}"
        if shown(str(folder)) not in text:
            text = f"{shown(str(folder))} cannot be written: {text}"
        raise CheckpointError("QN603", text, fix=error.fix) from error
    finally:
        if writes:
            _remove(temporary)


def _remove(folder: Path) -> bool:
    """Remove a folder, and return whether nothing of it is left."""
    shutil.rmtree(folder, ignore_errors=True)
    return not os.path.lexists(folder)


def _make(folder: Path, temporary: Path) -> None:
    """Make ``temporary``. Raises: CheckpointError: QN603 if ``folder`` has something in it, or is in a checkpoint."""
    text, fix = f"{shown(str(folder))} exists and is not an empty folder", "save into a new folder"
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise CheckpointError("QN603", text, fix=fix)
    for parent in folder.absolute().parents:
        if is_checkpoint(parent):
            text = f"{shown(str(folder))} is in the checkpoint {shown(str(parent))}, which would count as damaged"
            raise CheckpointError("QN603", text, fix=fix)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary.mkdir()
