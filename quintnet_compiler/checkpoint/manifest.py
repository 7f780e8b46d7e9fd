"""Folders of checkpoints: what belongs to each, how a new one appears, and whether an old one is whole.

A checkpoint is written beside its place and renamed into it when every byte is on the disk, so that what has its name
is complete. Its manifest has the size and SHA-256 of every file, and its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..weights.files import shown

MANIFEST = "manifest.json"
LARGEST_MANIFEST = 64 * 2**20
_NAME = re.compile(r"step-(\d{8,})")
_UNFINISHED = re.compile(r"\.step-\d{8,}\.[0-9a-f]{8}\.(tmp|old)")

Digest = tuple[int, str]  # of a file: its bytes, and their SHA-256


class Damaged(Exception):
    """Why a checkpoint cannot be used, with the file's name."""


def name_of(step: int) -> str:
    return f"step-{step:08}"


def steps_in(folder: Path) -> list[int]:
    """The steps of the complete checkpoints of a folder, the newest first."""
    if not folder.is_dir():
        return []
    found = (_NAME.fullmatch(entry.name) for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    return sorted((int(match[1]) for match in found if match), reverse=True)


def unfinished(folder: Path, step: int) -> Path:
    """Where a checkpoint is written before it has its name. What earlier, killed writers left is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    for entry in list(os.scandir(folder)):
        if _UNFINISHED.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
    return folder / f".{name_of(step)}.{secrets.token_hex(4)}.tmp"


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


def commit(temporary: Path, step: int, files: Mapping[str, Digest], keep: int | None) -> Path:
    """Write the manifest and give the checkpoint its name; with ``keep``, remove all but the newest so many.

    A checkpoint of the same step is replaced: it is moved away at the last moment, and removed when the new one is
    there.
    """
    manifest = {"version": 1, "step": step, "files": {name: list(files[name]) for name in sorted(files)}}
    write_durably(temporary / MANIFEST, json.dumps({**manifest, "sha256": _own(manifest)}, indent=1) + "\n")
    sync(temporary)
    final = temporary.parent / name_of(step)
    old = temporary.with_suffix(".old")
    if final.exists():
        os.rename(final, old)
    os.rename(temporary, final)
    sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)
    for other in steps_in(final.parent)[keep:] if keep else ():
        shutil.rmtree(final.parent / name_of(other), ignore_errors=True)
    return final


def _own(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def read_manifest(checkpoint: Path) -> dict[str, Digest]:
    """Each file of a checkpoint with its digest.

    Raises:
        Damaged: naming the manifest, or the file that is missing or does not belong here.
    """
    path = checkpoint / MANIFEST
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
    if own != _own(found) or found["version"] != 1 or name_of(found["step"]) != checkpoint.name:
        raise Damaged(f"{MANIFEST} is damaged, or of another checkpoint: its own SHA-256 does not match")
    there = {entry.name: entry.is_file(follow_symlinks=False) for entry in os.scandir(checkpoint)}
    for name in sorted(files.keys() - there.keys()):
        raise Damaged(f"{shown(name)} is missing")
    for name in sorted(there.keys() - files.keys() - {MANIFEST}):
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
