"""What belongs to a checkpoint: a manifest has the size of every file, the hash of its pieces, and its own SHA-256."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ..weights.files import shown
from .folder import CheckpointFiles, CheckpointFolder, Entry
from .pieces import PIECE, Digest, FilePiece, different, pieces_of, write

MANIFEST = "manifest.json"
LARGEST_MANIFEST = 256 * 2**20  # bytes: of 15 TiB in pieces
VERSION = 2


class Damaged(Exception):
    """Why a checkpoint cannot be used, with the file's name."""


def write_text(files: CheckpointFiles, name: str, text: str) -> Digest:
    with files.create(name) as file:
        return write(file, [memoryview(text.encode())])


def read_bytes(files: CheckpointFiles, name: str, largest: int | None = None) -> bytes:
    """A whole file.

    Raises:
        Damaged: if it has more than ``largest`` bytes.
    """
    with files.open(name) as file:
        if largest is not None and file.size > largest:
            raise Damaged(f"{name} is larger than {largest} bytes")
        found = bytearray(file.size)
        file.read_into(0, memoryview(found))
    return bytes(found)


def write_manifest(checkpoint: CheckpointFiles, step: int, files: Mapping[str, Digest]) -> None:
    sizes = {name: [files[name].size, list(files[name].pieces)] for name in sorted(files)}
    found = {"version": VERSION, "step": step, "piece": PIECE, "files": sizes}
    write_text(checkpoint, MANIFEST, json.dumps({**found, "sha256": _own(found)}, indent=1) + "\n")


def whole(entry: Entry) -> bool:
    """Whether a checkpoint has its files, in their sizes. Their contents are not read."""
    try:
        files = read_manifest(entry)
        sizes = entry.files.sizes()
        return all(sizes[name] == file.size for name, file in files.items())
    except (Damaged, OSError):
        return False


def available(folder: CheckpointFolder) -> list[Entry]:
    """What may be loaded, the newest first: named checkpoints, damaged or not, and whole ones without a name of steps
    that have none."""
    there = folder.named()
    steps = {entry.step for entry in there}
    more = [entry for entry in folder.leftovers() if entry.step not in steps and whole(entry)]
    return sorted([*there, *more], key=lambda entry: -entry.step)


def _own(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def read_manifest(entry: Entry) -> dict[str, Digest]:
    """Each file of a checkpoint with its digest.

    Raises:
        Damaged: naming the manifest, or the file that is missing or does not belong here.
    """
    try:
        found = json.loads(read_bytes(entry.files, MANIFEST, LARGEST_MANIFEST))
        own = found.pop("sha256")
        files = {str(name): Digest(int(size), tuple(map(str, each))) for name, (size, each) in found["files"].items()}
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} is damaged: {shown(str(error))}") from None
    if own != _own(found) or found["step"] != entry.step:
        raise Damaged(f"{MANIFEST} is damaged, or of another checkpoint: its own SHA-256 does not match")
    if (found["version"], found["piece"]) != (VERSION, PIECE):
        raise Damaged(f"{MANIFEST} has version {shown(str(found['version']))}, and this program reads {VERSION}")
    if any(len(file.pieces) != -(-file.size // PIECE) for file in files.values()):
        raise Damaged(f"{MANIFEST} is damaged: a file has another number of pieces than its size makes")
    there = entry.files.sizes()
    for name in sorted(files.keys() - there.keys()):
        raise Damaged(f"{shown(name)} is missing")
    for name in sorted(there.keys() - files.keys() - {MANIFEST}):
        if name.startswith("."):  # of a file manager, or of NFS
            continue
        raise Damaged(f"{shown(name)} does not belong to this checkpoint")
    for name in sorted(name for name in files if there[name] is None):
        raise Damaged(f"{shown(name)} is not a plain file")
    return files


def check_files(checkpoint: CheckpointFiles, files: Mapping[str, Digest], share: slice) -> None:
    """Compare files with what was written: sizes, and a ``share`` of all their pieces.

    Raises:
        Damaged: for one that is another.
    """
    with contextlib.ExitStack() as stack:
        pieces: list[FilePiece] = []
        for name, written in sorted(files.items()):
            file = stack.enter_context(checkpoint.open(name))
            if file.size != written.size:
                raise Damaged(f"{shown(name)} has {file.size} bytes, and {written.size} were written")
            pieces += pieces_of(name, file, written)
        other = different(pieces[share])
        if other is not None:
            raise Damaged(f"{shown(other)} is not what was written: its hash is another")
