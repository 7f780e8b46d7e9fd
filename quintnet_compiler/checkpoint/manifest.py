"""What belongs to a checkpoint: a manifest has the size and SHA-256 of every file, and its own."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..weights.files import shown
from .folder import Entry, leftovers, named

MANIFEST = "manifest.json"
LARGEST_MANIFEST = 64 * 2**20
Digest = tuple[int, str]  # of a file: its bytes, and their SHA-256


class Damaged(Exception):
    """Why a checkpoint cannot be used, with the file's name."""


def digest(path: Path) -> Digest:
    with open(path, "rb") as file:
        return os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()


def write_durably(path: Path, text: str) -> None:
    with open(path, "x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(folder: Path) -> None:
    """Make names in ``folder`` survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_manifest(checkpoint: Path, step: int, files: Mapping[str, Digest]) -> None:
    found = {"version": 1, "step": step, "files": {name: list(files[name]) for name in sorted(files)}}
    write_durably(checkpoint / MANIFEST, json.dumps({**found, "sha256": _own(found)}, indent=1) + "\n")


def whole(entry: Entry) -> bool:
    """Whether a checkpoint has its files, in their sizes. Their contents are not read."""
    try:
        files = read_manifest(entry)
        return all((entry.path / name).stat().st_size == size for name, (size, _) in files.items())
    except (Damaged, OSError):
        return False


def available(folder: Path) -> list[Entry]:
    """What may be loaded, the newest first: named checkpoints, damaged or not, and whole ones without a name of steps
    that have none."""
    there = named(folder)
    steps = {entry.step for entry in there}
    more = [entry for entry in leftovers(folder) if entry.step not in steps and whole(entry)]
    return sorted([*there, *more], key=lambda entry: -entry.step)


def _own(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def read_manifest(entry: Entry) -> dict[str, Digest]:
    """Each file of a checkpoint with its digest.

    Raises:
        Damaged: naming the manifest, or the file that is missing or does not belong here.
    """
    path = entry.path / MANIFEST
    try:
        if path.stat().st_size > LARGEST_MANIFEST:
            raise Damaged(f"{MANIFEST} is larger than {LARGEST_MANIFEST} bytes")
        found = json.loads(path.read_bytes())
        own = found.pop("sha256")
        files = {str(name): (int(size), str(sha)) for name, (size, sha) in found["files"].items()}
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} is damaged: {shown(str(error))}") from None
    if own != _own(found) or found["version"] != 1 or found["step"] != entry.step:
        raise Damaged(f"{MANIFEST} is damaged, or of another checkpoint: its own SHA-256 does not match")
    there = {entry.name: entry.is_file(follow_symlinks=False) for entry in os.scandir(entry.path)}
    for name in sorted(files.keys() - there.keys()):
        raise Damaged(f"{shown(name)} is missing")
    for name in sorted(there.keys() - files.keys() - {MANIFEST}):
        if name.startswith("."):  # of a file manager, or of NFS
            continue
        raise Damaged(f"{shown(name)} does not belong to this checkpoint")
    for name in sorted(name for name in files if not there[name]):
        raise Damaged(f"{shown(name)} is not a plain file")
    return files


def check_files(checkpoint: Path, files: Iterable[tuple[str, Digest]]) -> None:
    """Read files and compare them with their digests.

    Raises:
        Damaged: for the first that is another.
    """
    for name, (size, sha) in files:
        found = digest(checkpoint / name)
        if found[0] != size:
            raise Damaged(f"{shown(name)} has {found[0]} bytes, and {size} were written")
        if found[1] != sha:
            raise Damaged(f"{shown(name)} is not what was written: its SHA-256 is another")
