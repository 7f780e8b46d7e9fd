"""How a checkpoint appears in its folder, and when others go.

It is written under another name and gets its own when every byte is on the disk. At every moment the folder has at
least as many whole checkpoints as it had, or as are to be kept. Only the holder of the folder's lock does this.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

from .disk import sync
from .folder import abandoned, leftovers, name_of, named, next_abandoned
from .manifest import whole, write_manifest
from .pieces import Digest

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fs.h


def place_to_write(folder: Path, step: int) -> Path:
    """A new folder for a checkpoint that is not whole yet.

    A whole checkpoint that a dead writer left without its name gets it, and what else it left is removed.
    """
    for entry in leftovers(folder):
        final = folder / name_of(entry.step)
        if not final.exists() and whole(entry):
            os.rename(entry.path, final)
            sync(folder)
        else:
            _remove(entry.path)
    made = folder / f".{name_of(step)}.{secrets.token_hex(4)}.tmp"
    made.mkdir()
    return made


def commit(temporary: Path, step: int, files: Mapping[str, Digest], keep: int | None) -> Path:
    """Write the manifest and give the checkpoint its name.

    One of the same step is replaced. Those of later steps are of a run that this one left: they are moved to a folder
    ``abandoned-01`` (02, ...), so that the newest step is always this run's. With ``keep``, see :func:`prune`.
    """
    folder, final = temporary.parent, temporary.parent / name_of(step)
    write_manifest(temporary, step, files)
    sync(temporary)
    later = [entry for entry in named(folder) if entry.step > step]
    if later:
        aside = next_abandoned(folder)
        aside.mkdir()
        for entry in later:
            os.rename(entry.path, aside / entry.path.name)
        sync(aside)
    if final.exists():
        _exchange(temporary, final)
    else:
        os.rename(temporary, final)
    sync(folder)
    _remove(temporary)  # what had the name before
    if keep is not None:
        prune(folder, step, keep)
    return final


def prune(folder: Path, newest: int, keep: int) -> None:
    """Keep the ``keep`` newest whole checkpoints up to step ``newest``, which was just written, and remove the others.

    Damaged ones do not count (files are missing, or have other sizes: contents are not read), and are removed when so
    many whole ones are there. Then go those, too, of abandoned runs that were not farther than this one.
    """
    there = named(folder)
    good = [entry for entry in there if entry.step == newest or whole(entry)][:keep]
    if len(good) < keep:
        return
    for entry in there:
        if entry not in good:
            _remove(entry.path)
    for aside in abandoned(folder):
        for entry in named(aside):
            if entry.step <= newest:
                _remove(entry.path)
        with contextlib.suppress(OSError):  # it is not empty
            aside.rmdir()


def _exchange(one: Path, other: Path) -> None:
    """Both names in one step (renameat2), or, where the file system cannot, in two: what a kill between them leaves is
    found by :func:`.manifest.available`, and named again by the next writer."""
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "renameat2"):
        if not libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE):
            return
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise OSError(code, os.strerror(code), str(other))
    old = one.with_suffix(".old")
    os.rename(other, old)
    os.rename(one, other)
    sync(other.parent)
    _remove(old)


def _remove(path: Path) -> None:
    """A folder, or a link to one: what it points to stays."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
