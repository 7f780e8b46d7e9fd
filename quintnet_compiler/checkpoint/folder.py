"""Folders of checkpoints: what all of them do, on a file system (:mod:`.stores.disk_folder`) or in an object store
(:mod:`.stores.object_folder`). A checkpoint is there when it has its name, and gets it last, at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .pieces import FileSink
from .reading.open_files import OpenFiles


class CheckpointFiles(Protocol):
    """The files of one checkpoint."""

    @property
    def path(self) -> Path | str:
        """Its folder's path, or its URL."""

    @property
    def name(self) -> str: ...

    def open(self) -> AbstractContextManager[OpenFiles]:
        """Open it to read its files.

        Raises:
            VanishedError: if there is no such checkpoint.
            OSError: naming what cannot be read.
        """

    def create(self, name: str, /) -> AbstractContextManager[FileSink]:
        """Open a new file, which is stored when the ``with`` block ends without an error."""


class PublishedError(Exception):
    """Say what failed after a checkpoint got its name, or, if not ``certain``, when that could no longer be read.

    Attributes:
        certain: whether the checkpoint has its name.
        interrupt: what ended the save, if that was no error: Ctrl+C, or a signal's handler that exits.
    """

    def __init__(self, text: str, *, certain: bool = True, interrupt: BaseException | None = None) -> None:
        super().__init__(text)
        self.certain = certain
        self.interrupt = interrupt

    @classmethod
    def because_of(cls, cause: BaseException, *, certain: bool = True) -> PublishedError:
        """Return the error of what failed."""
        interrupt = None if isinstance(cause, Exception) else cause
        return cls(f"{type(cause).__name__}: {cause}", certain=certain, interrupt=interrupt)

    @classmethod
    @contextlib.contextmanager
    def instead(cls) -> Iterator[None]:
        """Raise it instead of anything else."""
        try:
            yield
        except BaseException as error:
            raise cls.because_of(error) from error


@dataclass(frozen=True)
class Entry:
    """A checkpoint: that of ``step``, whatever its name is."""

    step: int
    files: CheckpointFiles


class WriterLock(Protocol):
    """Held until it is released, or its process ends."""

    @property
    def release(self) -> Callable[[], object]: ...

    def in_place(self) -> bool:
        """Return whether this process still holds it."""


class CheckpointFolder(Protocol):
    """Checkpoints of a run. Only the holder of its lock calls what changes it."""

    @property
    def path(self) -> Path | str: ...

    def named(self) -> list[Entry]:
        """Return checkpoints that have their name, newest first. They may be damaged."""

    def leftovers(self) -> list[Entry]:
        """Return what dead writers left, newest first; of one step, a replacement before what it was to replace."""

    def unusable(self) -> list[str]:
        """Return names that a checkpoint would have, of what is none: a file, or a link that leads nowhere."""

    def abandoned(self) -> Sequence[CheckpointFolder]:
        """Return folders of checkpoints that a run left behind, those of the last first."""

    def at(self, name: str, /) -> CheckpointFiles: ...

    def lock(self) -> WriterLock:
        """Raises: CheckpointError: QN603 if another process writes there."""

    def new(self, step: int, /) -> CheckpointFiles:
        """Make room for a checkpoint without a name. Raises: FileExistsError if ``step-N`` is no checkpoint."""

    def publish(self, checkpoint: CheckpointFiles, step: int, /) -> CheckpointFiles:
        """Give ``checkpoint``, which is whole, its name. One of the same step is replaced, at once.

        Raises:
            FileExistsError: if the name is that of something else than a checkpoint.
            PublishedError: if something failed when it had its name.
        """

    def write_mark(self, text: str, /) -> None:
        """Store a text at once, in place of one that is there: see :func:`.manifest.of_this_run`."""

    def read_mark(self) -> bytes:
        """Return that text; empty if there is none."""

    def remove_mark(self) -> None: ...

    def set_aside(self, entries: Sequence[Entry], /) -> None:
        """Move named checkpoints to a new folder ``abandoned-01`` (02, ...)."""

    def remove(self, files: CheckpointFiles, /) -> None: ...

    def remove_if_empty(self) -> None: ...


MARK = ".leaving.json"
STEP_NAME = "step-([0-9]{8}|[1-9][0-9]{8,})"  # what name_of returns, and no other name of the same step
ABANDONED_NAME = "abandoned-([0-9]{2}|[1-9][0-9]{2,})"


def name_of(step: int) -> str:
    return f"step-{step:08}"


def abandoned_name(number: int) -> str:
    return f"abandoned-{number:02}"
