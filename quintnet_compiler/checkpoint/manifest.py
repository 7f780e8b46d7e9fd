"""What belongs to a checkpoint: a manifest has the size of every file, the hash of its pieces, and its own SHA-256."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core.errors import CheckpointError
from ..weights.files import shown
from .folder import CheckpointFiles, CheckpointFolder, Entry, name_of
from .pieces import PIECE, Digest, FilePiece, Share, VerifiedSource, compared, pieces_of, write
from .reading.open_files import Damaged, OpenFile, OpenFiles, OtherFormatError, VanishedError

MANIFEST = "manifest.json"
LARGEST_MANIFEST = 256 * 2**20  # bytes: of 15 TiB in pieces
VERSION = 2


@dataclass(frozen=True)
class WrittenFiles:
    """The files of an open checkpoint, and what its manifest says of each."""

    files: OpenFiles
    digests: Mapping[str, Digest]

    def pieces_of_file(self, name: str) -> list[FilePiece]:
        """Return the pieces of a file."""
        return pieces_of(name, self.files.file(name), self.digests[name])

    def verified(self, name: str) -> VerifiedSource:
        """Return a file that is compared with its hashes as it is read."""
        if name not in self.digests:
            raise Damaged(f"{shown(name)} is missing")
        return VerifiedSource(self.files.file(name), self.pieces_of_file(name))

    def read_verified(self, name: str) -> bytes:
        """Return a whole file.

        Raises:
            Damaged: if it is missing, or has other bytes than were written.
        """
        source = self.verified(name)
        data = bytearray(source.size)
        source.read_into(0, memoryview(data))
        return bytes(data)


def write_text(files: CheckpointFiles, name: str, text: str) -> Digest:
    with files.create(name) as file:
        return write(file, [memoryview(text.encode())])


def write_manifest(checkpoint: CheckpointFiles, step: int, files: Mapping[str, Digest]) -> str:
    """Write the manifest of a checkpoint, and return its SHA-256."""
    sizes = {name: [files[name].size, list(files[name].pieces)] for name in sorted(files)}
    content = {"version": VERSION, "step": step, "piece": PIECE, "files": sizes}
    digest = _own(content)
    write_text(checkpoint, MANIFEST, json.dumps({**content, "sha256": digest}, indent=1) + "\n")
    return digest


def is_named(folder: CheckpointFolder, step: int, digest: str) -> bool:
    """Return whether the checkpoint of ``step`` has a manifest of this SHA-256.

    Raises:
        OSError: if there is one, and it cannot be read.
    """
    try:
        with folder.at(name_of(step)).open() as files:
            return bool(_document(files.file(MANIFEST))["sha256"] == digest)
    except (Damaged, VanishedError, TypeError, KeyError):
        return False


def of_this_run(folder: CheckpointFolder, entries: Sequence[Entry]) -> list[Entry]:
    """Return those of named ``entries`` that the folder's run has not left.

    A run that goes back publishes its checkpoint, and then sets later ones aside. Meanwhile, and if it is killed there,
    a mark in the folder has the step and the manifest's SHA-256 of what was published: later steps do not count then.
    Read after ``entries`` were listed: when the mark is gone, they are, too.
    """
    try:
        mark = json.loads(folder.read_mark() or b"{}")
        step, digest = int(mark["step"]), str(mark["sha256"])
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return list(entries)
    if not is_named(folder, step, digest):  # it was not published
        return list(entries)
    return [entry for entry in entries if entry.step <= step]


def whole(entry: Entry) -> bool | None:
    """Return whether a checkpoint has its files, in their sizes. Their contents are not read.

    None if this cannot be known: it cannot be read now, or has another format. Nothing may remove or replace it then.
    """
    try:
        _check_shape(entry)
    except (Damaged, VanishedError):
        return False
    except Exception:  # of the system, a store's library, or another format
        return None
    return True


def require_replaceable(entry: Entry) -> None:
    """Refuse to replace a checkpoint that may be whole, but cannot be read.

    Raises:
        CheckpointError: QN603.
    """
    try:
        _check_shape(entry)
    except (Damaged, VanishedError):
        return
    except Exception as error:
        raise CheckpointError(
            "QN603",
            f"{shown(str(entry.files.path))} is not replaced: it may be whole, and cannot be read: {shown(str(error))}",
            fix="save another step, or remove it first",
        ) from error


def _check_shape(entry: Entry) -> None:
    with entry.files.open() as files:
        check_sizes(read_manifest(files, entry.step))


def available(folder: CheckpointFolder) -> list[Entry]:
    """List what may be loaded, the newest first.

    Named checkpoints of the folder's run, damaged or not, and of steps that have none those without a name that are
    whole, or cannot be read now.

    Raises:
        OSError: if the folder cannot be read.
    """
    there = of_this_run(folder, folder.named())
    steps = {entry.step for entry in there}
    more = [entry for entry in folder.leftovers() if entry.step not in steps and whole(entry) is not False]
    return sorted([*there, *more], key=lambda entry: -entry.step)


def _own(manifest: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def read_manifest(files: OpenFiles, step: int) -> WrittenFiles:
    """Return the files of the checkpoint of ``step``, with the digest of each.

    Raises:
        Damaged: naming the manifest, or the file that is missing or does not belong here.
        OtherFormatError: if another version wrote it.
    """
    document = _document(files.file(MANIFEST))
    try:
        own = document.pop("sha256")
        version, piece, its_step = document["version"], document["piece"], document["step"]
        if own != _own(document) and own == _own({**document, "version": VERSION}):
            raise ValueError("its version was changed")
        if type(version) is int and version != VERSION:
            raise OtherFormatError(f"{MANIFEST} has version {shown(str(version))}, and this program reads {VERSION}")
        if own != _own(document) or its_step != step:
            raise Damaged(f"{MANIFEST} is damaged, or of another checkpoint: its own SHA-256 does not match")
        if piece != PIECE:
            raise OtherFormatError(
                f"{MANIFEST} has pieces of {shown(str(piece))} bytes, and this program reads {PIECE}"
            )
        sizes = document["files"].items()
        digests = {str(name): Digest(int(size), tuple(map(str, each))) for name, (size, each) in sizes}
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} is damaged: {shown(str(error))}") from None
    if any(len(digest.pieces) != -(-digest.size // PIECE) for digest in digests.values()):
        raise Damaged(f"{MANIFEST} is damaged: a file has another number of pieces than its size makes")
    _check_names(files, digests)
    return WrittenFiles(files, digests)


def step_of_manifest(files: OpenFiles) -> int:
    """Return the step that a manifest says; nothing is compared. Raises: Damaged: if it says none."""
    if type(step := _document(files.file(MANIFEST)).get("step")) is int:
        return step
    raise Damaged(f"{MANIFEST} is damaged: it has the step {shown(str(step))}")


def _document(file: OpenFile) -> dict[str, Any]:
    if file.size > LARGEST_MANIFEST:
        raise Damaged(f"{MANIFEST} is larger than {LARGEST_MANIFEST} bytes")
    text = bytearray(file.size)
    file.read_into(0, memoryview(text))
    try:
        document: dict[str, Any] = parsed(text)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} is damaged: {shown(str(error))}") from None
    return document


def parsed(text: bytes | bytearray) -> Any:
    """Return what JSON says.

    Raises:
        ValueError: if it is none, or says two things of one name.
        RecursionError: if it is too deep.
    """
    return json.loads(text, object_pairs_hook=_of_pairs)


def _of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        twice = next(name for name in values if sum(name == other for other, _ in pairs) > 1)
        raise ValueError(f"{shown(twice)} is there twice")
    return values


def _check_names(files: OpenFiles, digests: Mapping[str, Digest]) -> None:
    for name in sorted(digests.keys() - files.stamps.keys()):
        raise Damaged(f"{shown(name)} is missing")
    for name in sorted(files.stamps.keys() - digests.keys() - {MANIFEST}):
        if name.startswith("."):  # of a file manager, or of NFS
            continue
        raise Damaged(f"{shown(name)} does not belong to this checkpoint")
    for name in sorted(digests):
        files.file(name)


def check_sizes(written: WrittenFiles) -> None:
    """Compare the sizes of files with what was written.

    Raises:
        Damaged: for one that is another.
    """
    for name, digest in sorted(written.digests.items()):
        size = written.files.file(name).size
        if size != digest.size:
            raise Damaged(f"{shown(name)} has {size} bytes, and {digest.size} were written")


@contextlib.contextmanager
def files_checked(written: WrittenFiles, share: Share = Share()) -> Iterator[None]:
    """Compare files with what was written, while a ``with`` block runs: sizes, and a ``share`` of all their pieces.

    Raises:
        Damaged: for one that is another, at the end of the block.
    """
    check_sizes(written)
    pieces = [piece for name in sorted(written.digests) for piece in written.pieces_of_file(name)]
    with compared(share.share_of(pieces)):
        yield
