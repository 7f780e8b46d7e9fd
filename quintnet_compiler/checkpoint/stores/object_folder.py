"""A folder of checkpoints in an object store, which cannot rename: a checkpoint gets its name by one small object.

``step-00000042.json`` names the prefix that has a checkpoint's files, as ``data/step-00000042.<token>/``. It is written
last, and a store writes an object at once: what it named before, if there was one of this step, is replaced then. What
no such object names was left by a writer that died, and the next one removes it. ``abandoned-01/step-00000042.json`` is
of a run that went on from an earlier step; files stay where they are.
"""

from __future__ import annotations

import contextlib
import json
import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fsspec import AbstractFileSystem

from ..folder import (
    ABANDONED_NAME,
    MARK,
    STEP_NAME,
    CheckpointFiles,
    Entry,
    PublishedError,
    abandoned_name,
    name_of,
)
from ..manifest import MANIFEST
from ..pieces import PIECE
from ..reading.open_files import FileStamp, OpenFiles, VanishedError
from .object_lock import ObjectLock

_NAME = re.compile(rf"({STEP_NAME})\.json")
_DATA = re.compile(rf"{STEP_NAME}\.[0-9a-f]{{16}}")
_ABANDONED = re.compile(ABANDONED_NAME)
_PART = 32 * 2**20  # bytes that are sent at once
_LARGEST_NAME = 4096  # bytes
_VERSIONS = (  # what stores call it
    *("ETag", "etag", "VersionId", "version_id", "generation", "md5Hash"),
    *("created", "LastModified", "last_modified", "mtime"),
)
_MISSING = "missing"  # the prefix of a name that cannot be read


@dataclass(frozen=True)
class ObjectSink:
    """An object that is written: it is there when it is closed."""

    file: Any

    def write(self, piece: Sequence[memoryview]) -> None:
        for part in piece:
            self.file.write(part)


@dataclass(frozen=True)
class ObjectFiles:
    """A checkpoint's files.

    ``prefix``: of the files. ``name``: what ranks tell each other. ``pointer``: the object that names the prefix, if
    there is one.
    """

    store: AbstractFileSystem
    prefix: str
    name: str
    pointer: str | None = None

    @property
    def path(self) -> str:
        return str(self.store.unstrip_protocol(self.prefix))

    @contextlib.contextmanager
    def open(self) -> Iterator[OpenFiles]:
        stamps = self._stamps()
        if not stamps and self.replaced():
            raise VanishedError(f"{self.name} is not there any more")
        yield OpenFiles(self.path, stamps, self.fill, self.replaced, partial(self._changed, stamps), PIECE)

    def fill(self, name: str, offset: int, into: memoryview) -> None:
        """Fill ``into`` with bytes of an object.

        Raises:
            VanishedError: if it is not there any more, or shorter.
        """
        if not len(into):
            return
        key = f"{self.prefix}/{name}"
        try:
            data = self.store.cat_file(key, start=offset, end=offset + len(into))
        except FileNotFoundError as error:
            raise VanishedError(f"{key} was removed") from error
        if len(data) != len(into):
            raise VanishedError(f"{key} ends at byte {offset + len(data)}")
        into[:] = data

    def replaced(self) -> bool:
        """Return whether the checkpoint's name stands for another prefix now, or for none."""
        return self.pointer is not None and _last(self.prefix) != _prefix_named_by(self.store, self.pointer)

    def _stamps(self) -> dict[str, FileStamp]:
        return {
            _last(entry["name"]): FileStamp(int(entry["size"]), _version(entry))
            for entry in _listed(self.store, self.prefix)
            if entry["type"] == "file"
        }

    def _changed(self, stamps: Mapping[str, FileStamp], names: Collection[str]) -> list[str]:
        """Return those of ``names`` that were written again. What was removed has not changed."""
        now = self._stamps()
        return [name for name in names if name in now and now[name] != stamps[name]]

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[ObjectSink]:
        file = self.store.open(f"{self.prefix}/{name}", "wb", block_size=_PART)
        try:
            yield ObjectSink(file)
        except BaseException:
            with contextlib.suppress(Exception):
                file.discard()
            raise
        file.close()


@dataclass(frozen=True)
class ObjectFolder:
    """``root``: the prefix of all, without the store's name."""

    store: AbstractFileSystem
    root: str

    @property
    def path(self) -> str:
        return str(self.store.unstrip_protocol(self.root))

    def named(self) -> list[Entry]:
        matches = ((match, match[1]) for match in map(_NAME.fullmatch, self._names()) if match)
        entries = [Entry(int(match[2]), self.at(name)) for match, name in matches]
        return sorted(entries, key=lambda entry: -entry.step)

    def unusable(self) -> list[str]:
        return []

    def leftovers(self) -> list[Entry]:
        """None: what has no name may have been written or removed in part, and no name is ever missing for a while."""
        return []

    def abandoned(self) -> Sequence[ObjectFolder]:
        numbers = sorted((int(match[1]) for match in map(_ABANDONED.fullmatch, self._names()) if match), reverse=True)
        return [ObjectFolder(self.store, f"{self.root}/{abandoned_name(n)}") for n in numbers]

    def at(self, name: str) -> ObjectFiles:
        """Return the files of a checkpoint by its name, or by that of its prefix."""
        if _DATA.fullmatch(name):
            return ObjectFiles(self.store, self._data(name), name)
        pointer = f"{self.root}/{name}.json"
        return ObjectFiles(self.store, self._data(_prefix_named_by(self.store, pointer)), name, pointer)

    def lock(self) -> ObjectLock:
        return ObjectLock(self.store, self.root)

    def new(self, step: int) -> ObjectFiles:
        used = self._used()
        for entry in _listed(self.store, self._data()):
            if not {_last(entry["name"]), _MISSING} & used:  # a name that cannot be read may be of any of them
                _remove(self.store, self._data(_last(entry["name"])))
        return self.at(f"{name_of(step)}.{secrets.token_hex(8)}")

    def publish(self, checkpoint: CheckpointFiles, step: int) -> ObjectFiles:
        name = name_of(step)
        replaced = _last(self.at(name).prefix)
        self.store.pipe_file(f"{self.root}/{name}.json", json.dumps({"files": checkpoint.name}).encode())
        with PublishedError.instead():
            if replaced not in self._used():
                _remove(self.store, self._data(replaced))
            return self.at(name)

    def write_mark(self, text: str) -> None:
        self.store.pipe_file(f"{self.root}/{MARK}", text.encode())

    def read_mark(self) -> bytes:
        try:
            return bytes(self.store.cat_file(f"{self.root}/{MARK}"))
        except FileNotFoundError:
            return b""

    def remove_mark(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.store.rm_file(f"{self.root}/{MARK}")

    def set_aside(self, entries: Sequence[Entry]) -> None:
        last = next(iter(self.abandoned()), None)
        number = 1 if last is None else int(last.root.rpartition("-")[2]) + 1
        for entry in entries:
            document = self.store.cat_file(f"{self.root}/{entry.files.name}.json")
            self.store.pipe_file(f"{self.root}/{abandoned_name(number)}/{entry.files.name}.json", document)
            self.store.rm_file(f"{self.root}/{entry.files.name}.json")

    def remove(self, files: CheckpointFiles) -> None:
        checkpoint = self.at(files.name)
        with contextlib.suppress(FileNotFoundError):
            self.store.rm_file(f"{self.root}/{files.name}.json")
        if _last(checkpoint.prefix) not in self._used():
            _remove(self.store, checkpoint.prefix)

    def remove_if_empty(self) -> None:
        """Do nothing: a prefix without objects is not there."""

    def _top(self) -> str:
        """Return the prefix of ``data/``, which abandoned folders share."""
        above, _, name = self.root.rpartition("/")
        return above if _ABANDONED.fullmatch(name) else self.root

    def _data(self, name: str = "") -> str:
        return f"{self._top()}/data/{name}".rstrip("/")

    def _used(self) -> set[str]:
        """Return the prefixes that names stand for, here and in abandoned folders."""
        top = ObjectFolder(self.store, self._top())
        folders = [top, *top.abandoned()]
        return {_last(folder.at(entry.files.name).prefix) for folder in folders for entry in folder.named()}

    def _names(self) -> list[str]:
        return [_last(entry["name"]) for entry in _listed(self.store, self.root)]


def _prefix_named_by(store: AbstractFileSystem, pointer: str) -> str:
    """Return the last part of the prefix that an object names.

    If there is none, or it may lead elsewhere, return one that nothing has.
    """
    try:
        prefix = str(json.loads(store.cat_file(pointer, end=_LARGEST_NAME))["files"])
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return _MISSING
    return prefix if _DATA.fullmatch(prefix) else _MISSING


def _version(entry: Mapping[str, Any]) -> str:
    """Return what a store says of an object that is another when it is written again."""
    return repr([str(entry[key]) for key in _VERSIONS if key in entry])


def _last(key: str) -> str:
    return key.rstrip("/").rpartition("/")[2]


def _listed(store: AbstractFileSystem, prefix: str) -> list[dict[str, Any]]:
    store.invalidate_cache()
    try:
        entries: list[dict[str, Any]] = store.ls(prefix, detail=True)
    except FileNotFoundError:
        return []
    return entries


def _remove(store: AbstractFileSystem, prefix: str) -> None:
    """Remove the manifest first, so that what is left is not whole, and then the rest."""
    with contextlib.suppress(FileNotFoundError):
        store.rm_file(f"{prefix}/{MANIFEST}")
    with contextlib.suppress(FileNotFoundError):
        store.rm(prefix, recursive=True)
