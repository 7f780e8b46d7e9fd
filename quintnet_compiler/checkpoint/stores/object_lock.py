"""One process at a time writes checkpoints into a prefix of an object store.

A store has no locks that end with a process. The writer creates ``.writer``, which stores that have conditional puts
refuse if it is there, and writes it again every few seconds. Another process takes it over when it has not changed for
a while; the writer sees that before it gives a checkpoint its name, and refuses to go on. The time of one request
between this look and the name cannot be excluded. Both checkpoints are whole then, too: each has a prefix of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import threading
import time
import warnings
import weakref
from dataclasses import asdict, dataclass, field

from fsspec import AbstractFileSystem

from ...core.errors import CheckpointWarning
from ...runtime.threads.room import start_thread
from ...weights.files import shown
from ..lock import NAME, Holder, refused

_LARGEST = 4096  # bytes
BEAT, PATIENCE, LOOK = 10.0, 35.0, 1.0  # seconds: between writes, until the writer is taken for dead, between looks


@dataclass(frozen=True)
class WriterObject:
    """``.writer`` as one process writes it. ``token``: tells its writers apart."""

    store: AbstractFileSystem
    key: str
    holder: Holder
    token: str
    process: int = field(default_factory=os.getpid)

    def document(self, beat: int) -> bytes:
        return json.dumps({**asdict(self.holder), "token": self.token, "beat": beat}).encode()

    def write(self, beat: int) -> None:
        self.store.pipe_file(self.key, self.document(beat))

    def create(self) -> bool:
        """Write it if there is none."""
        try:
            self.store.pipe_file(self.key, self.document(0), mode="create")
        except FileExistsError:
            return False
        except (NotImplementedError, TypeError, ValueError) as error:
            message = f"{shown(self.key)} cannot be locked ({type(error).__name__}): only one run may write there"
            warnings.warn(CheckpointWarning(message), stacklevel=2)
            self.write(0)
        return True

    def there(self) -> tuple[str, Holder | None, int]:
        """Token, process and count of whose it is now."""
        try:
            text = self.store.cat_file(self.key, end=_LARGEST)
            document = json.loads(text)
            return str(document["token"]), Holder.from_document(text), int(document["beat"])
        except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return "", None, 0

    def mine(self) -> bool:
        """Return whether it is this process's: a fork of it has the same token."""
        return self.process == os.getpid() and self.there()[0] == self.token


class ObjectLock:
    """A prefix's ``.writer``, until this object is gone or the process ends."""

    def __init__(self, store: AbstractFileSystem, root: str) -> None:
        """Lock the prefix ``root``.

        Raises:
            CheckpointError: QN603 if another process writes there.
        """
        self._writer = WriterObject(store, f"{root}/{NAME}", Holder.here(), secrets.token_hex(8))
        self._take(str(store.unstrip_protocol(root)))
        ended = threading.Event()
        self.release = weakref.finalize(self, _release, self._writer, ended)
        start_thread(threading.Thread(target=_beat, args=(self._writer, ended), name="quintnet-lock", daemon=True))

    def in_place(self) -> bool:
        """Return whether the object still is this process's."""
        return self.release.alive and self._writer.mine()

    def _take(self, where: str) -> None:
        last_state, until = None, time.monotonic() + PATIENCE
        while not self._writer.create():
            state = self._writer.there()
            holder = state[1]
            if holder == self._writer.holder:  # an earlier lock of this process, which could not be removed
                self._writer.write(0)
                return
            if last_state is not None and state != last_state:
                raise refused(where, holder.description if holder else "another process")
            last_state = state
            if time.monotonic() < until and (holder is None or not holder.ended()):
                time.sleep(LOOK)
            elif self._writer.there() == state:
                with contextlib.suppress(FileNotFoundError):
                    self._writer.store.rm_file(self._writer.key)


def _beat(writer: WriterObject, ended: threading.Event) -> None:
    for beat in itertools.count(1):
        if ended.wait(BEAT):
            return
        with contextlib.suppress(Exception):  # the next one may succeed
            if not writer.mine():
                return
            writer.write(beat)


def _release(writer: WriterObject, ended: threading.Event) -> None:
    ended.set()
    with contextlib.suppress(Exception):  # others see that it does not change any more
        if writer.mine():
            writer.store.rm_file(writer.key)
