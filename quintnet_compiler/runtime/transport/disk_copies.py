"""Values of an accelerator in files: written from pinned memory of its host while it computes, and read back."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor

from ...ir.distributed_program import DiskSpec
from .host_copies import PLAIN, HostCopies, host_room
from .transport import Pending

SLOTS = 2  # values in memory of the host that wait to be written; one more is read
LOCK = "lock"
Made = TypeVar("Made")


@dataclass(frozen=True)
class StoredValue:
    """A value in a file: ``written`` is done when it has all of it."""

    path: Path
    written: Future[None]


class DiskCopies:
    """What generated code calls to have a value in a file of ``folder``, which is this rank's own.

    A value leaves the device for one of two pieces of pinned memory, from where a thread writes it; who has another
    value waits until a piece is free. Room in the file is asked for first, so that a full disk is an error at once, in
    the caller. Another thread reads values in the order in which they are asked for, and copies them to the device.
    Files are removed when nobody has the value, and the folder at the end of this object or of the process; what a
    killed process left is removed by the next one in the same place.

    Raises:
        OSError: the folder cannot be made, or a file cannot be written or read; it names the folder.
    """

    def __init__(self, spec: DiskSpec, rank: int, copies: HostCopies) -> None:
        self.parent, self.largest, self.copies = Path(spec.folder), spec.largest, copies
        self.folder, lock = self._named(lambda: _own_folder(self.parent, rank))
        Finalize(self, _close, (self.folder, lock), exitpriority=0)  # at the end of a process of whatever kind, too
        self.files: set[Path] = set()
        self.made = 0
        self.slots: SimpleQueue[Tensor] = SimpleQueue()
        for _ in range(SLOTS):
            self.slots.put(torch.empty(0, dtype=torch.uint8))
        self.arrived = torch.empty(0, dtype=torch.uint8)  # what is read
        self.last: torch.Event | None = None  # when that is on the device
        self.writer, self.reader = (ThreadPoolExecutor(1, f"quintnet-{name}") for name in ("write", "read"))

    def write_out(self, x: Tensor, at: int) -> Tensor:
        made: Tensor = self.start_write_out(x, at)()
        return made

    def read_in(self, x: Tensor, device: torch.device, at: int) -> Tensor:
        made: Tensor = self.start_read_in(x, device, at)()
        return made

    def start_write_out(self, x: Tensor, at: int) -> Pending:
        """Start a copy to a file; when waited for, the memory of ``x`` is free, and the result stands for it."""
        path = self._named(lambda: self._reserve(x.nbytes))
        stand = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        weakref.finalize(stand, _remove, path, self.files, os.getpid())
        slot = self.slots.get()
        slot = slot if slot.nbytes >= x.nbytes else self._room(x.nbytes, x.device)
        free = self.copies.start_into(_like(slot, x), x)
        there = None if x.device.type in PLAIN else self.copies.stream(x.device, "out").record_event()
        written = self.writer.submit(self._write, path, slot, x.nbytes, there)
        stand.stored = StoredValue(path, written)  # type: ignore[attr-defined]
        return lambda: (free(), stand)[1]

    def start_read_in(self, x: Tensor, device: torch.device, at: int) -> Pending:
        """Start to copy what ``start_write_out`` wrote to the device. The host waits until it is read."""
        room = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        stored: StoredValue = x.stored  # type: ignore[attr-defined]
        begun = None
        if device.type not in PLAIN:
            begun = torch.accelerator.current_stream(device).record_event()
            self.copies.stream(room.device, "read")  # made by this thread
        read = self.reader.submit(self._read, stored, room, begun)
        held = [x]  # whose file is removed with it

        def wait() -> Tensor:
            done = self._named(read.result)
            if done is not None:
                torch.accelerator.current_stream(device).wait_event(done)
            held.clear()
            return room

        return wait

    def clear(self) -> None:
        """Remove all files: a step has failed."""
        for path in list(self.files):
            _remove(path, self.files, os.getpid())

    def _named(self, call: Callable[[], Made]) -> Made:
        try:
            return call()
        except OSError as error:
            said = f"{error.strerror} (offload_folder, where saved values wait)"
            raise OSError(error.errno, said, str(self.parent)) from error

    def _reserve(self, size: int) -> Path:
        """A file with room for so many bytes."""
        path = self.folder / str(self.made)
        self.made += 1
        self.files.add(path)
        try:
            with path.open("xb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
        except OSError:
            _remove(path, self.files, os.getpid())
            raise
        return path

    def _room(self, size: int, device: torch.device) -> Tensor:
        return host_room((max(size, self.largest),), torch.uint8, device)

    def _write(self, path: Path, slot: Tensor, size: int, there: torch.Event | None) -> None:
        try:
            if there is not None:
                there.synchronize()
            left = slot[:size].numpy().data
            with path.open("r+b", buffering=0) as file:
                while left:
                    left = left[file.write(left) :]
        finally:
            self.slots.put(slot)

    def _read(self, stored: StoredValue, room: Tensor, begun: torch.Event | None) -> torch.Event | None:
        stored.written.result()
        if self.last is not None:
            self.last.synchronize()
        if self.arrived.nbytes < room.nbytes:
            self.arrived = self._room(room.nbytes, room.device)
        left = self.arrived[: room.nbytes].numpy().data
        with stored.path.open("rb", buffering=0) as file:
            while left:
                if not (count := file.readinto(left)):
                    raise OSError(errno.EIO, "a file is shorter than it was")
                left = left[count:]
        there = _like(self.arrived, room)
        if begun is None:
            room.copy_(there)
            return None
        stream = self.copies.stream(room.device, "read")
        stream.wait_event(begun)
        with stream:
            room.copy_(there, non_blocking=True)
        self.last = stream.record_event()
        return self.last


def _like(slot: Tensor, x: Tensor) -> Tensor:
    """Memory of the host with the layout of ``x``."""
    return slot[: x.nbytes].view(x.dtype).as_strided(x.shape, x.stride())


def _own_folder(parent: Path, rank: int) -> tuple[Path, int]:
    """A new folder, and a lock that says that it is in use; those of others that nobody has locked are removed."""
    for lock in parent.glob(f"quintnet-*/{LOCK}"):
        _remove_unused(lock)
    folder = Path(tempfile.mkdtemp(prefix=f"quintnet-{rank}-", dir=parent))
    held = os.open(folder / "new", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(held, fcntl.LOCK_EX)
    (folder / "new").rename(folder / LOCK)
    return folder, held


def _remove_unused(lock: Path) -> None:
    try:
        asked = os.open(lock, os.O_RDWR)
    except OSError:  # it has just been removed, or is another user's
        return
    try:
        fcntl.flock(asked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(lock.parent, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(asked)


def _remove(path: Path, files: set[Path], process: int) -> None:
    """In the process that made it: a fork of it has the same objects."""
    if os.getpid() == process:
        files.discard(path)
        path.unlink(missing_ok=True)


def _close(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
