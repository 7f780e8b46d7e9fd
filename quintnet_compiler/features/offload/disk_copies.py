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

from ...compat.torch_codegen import SHIPPED
from ...ir.distributed_program import SLOTS, DiskSpec, DistributedProgram
from ...runtime.transport.host_copies import PLAIN, HostCopies, host_room
from ...runtime.transport.transport import Pending

LOCK = "lock"
Result = TypeVar("Result")


@dataclass(frozen=True)
class StoredValue:
    """A value in a file; ``written`` is done when the file is complete."""

    path: Path
    written: Future[None]


class DiskCopies:
    """Offloads and fetches values for generated code, in files of a folder of this rank.

    A value is copied from the device to one of :data:`SLOTS` pinned buffers, and a thread writes it from there; the
    caller waits while no buffer is free. Space in the file is reserved first, so that a full disk raises at once, in
    the caller. Another thread reads values in the order of the calls, and copies them to the device. A file is removed
    with the last reference to its value, and the folder at the end of this object or of the process. Folders that
    killed processes left are removed by the next process that uses the same parent folder.

    Raises:
        OSError: the folder cannot be made, or a file cannot be written or read; the error names the folder.
    """

    def __init__(self, spec: DiskSpec, rank: int, copies: HostCopies) -> None:
        """Make the folder of a rank, and the threads that write and read in it."""
        self.parent, self.largest, self.copies = Path(spec.folder), spec.largest, copies
        self.folder, lock = self._naming_folder(lambda: _own_folder(self.parent, rank))
        Finalize(
            self, _close, (self.folder, lock), exitpriority=0
        )  # also at the end of processes that multiprocessing started
        self.files: set[Path] = set()
        self.file_count = 0
        self.slots: SimpleQueue[Tensor] = SimpleQueue()
        for _ in range(SLOTS):
            self.slots.put(torch.empty(0, dtype=torch.uint8))
        self.arrived = torch.empty(0, dtype=torch.uint8)  # the pinned buffer for reading
        self.last: torch.Event | None = None  # the last copy of that buffer to the device is done
        self.writer, self.reader = (ThreadPoolExecutor(1, f"quintnet-{name}") for name in ("write", "read"))

    @classmethod
    def of_rank(
        cls, program: DistributedProgram, rank: int, device: torch.device, copies: HostCopies
    ) -> DiskCopies | None:
        """Return the copies of a rank; None if its program writes nothing, or has no values."""
        return None if program.disk is None or device.type == "meta" else cls(program.disk, rank, copies)

    def write_out(self, x: Tensor, at: int) -> Tensor:
        """Write a value to a file, and return what stands in for it."""
        stand_in: Tensor = self.start_write_out(x, at)()
        return stand_in

    def read_in(self, x: Tensor, device: torch.device, at: int) -> Tensor:
        """Return on the device what was written."""
        value: Tensor = self.start_read_in(x, device, at)()
        return value

    def start_write_out(self, x: Tensor, at: int) -> Pending:
        """Start a copy to a file; after the wait, the memory of ``x`` is free, and the result stands in for it."""
        path = self._naming_folder(lambda: self._reserve(x.nbytes))
        stand_in = SHIPPED.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        weakref.finalize(stand_in, _remove, path, self.files, os.getpid())
        slot = self.slots.get()
        slot = slot if slot.nbytes >= x.nbytes else self._room(x.nbytes, x.device)
        free = self.copies.start_into(_like(slot, x), x)
        copied = None if x.device.type in PLAIN else self.copies.stream(x.device, "out").record_event()
        written = self.writer.submit(self._write, path, slot, x.nbytes, copied)
        stand_in.stored = StoredValue(path, written)  # type: ignore[attr-defined]
        return lambda: (free(), stand_in)[1]

    def start_read_in(self, x: Tensor, device: torch.device, at: int) -> Pending:
        """Start to copy what :meth:`start_write_out` wrote to the device. The wait blocks the host until it is read."""
        room = SHIPPED.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
        stored: StoredValue = x.stored  # type: ignore[attr-defined]
        started = None
        if device.type not in PLAIN:
            started = torch.accelerator.current_stream(device).record_event()
            self.copies.stream(room.device, "read")  # made by this thread
        reading = self.reader.submit(self._read, stored, room, started)
        alive = [x]  # the file is removed with it

        def wait() -> Tensor:
            done = self._naming_folder(reading.result)
            if done is not None:
                torch.accelerator.current_stream(device).wait_event(done)
            alive.clear()
            return room

        return wait

    def drop_values(self) -> None:
        """Remove all files: a step has failed."""
        for path in list(self.files):
            _remove(path, self.files, os.getpid())

    def _naming_folder(self, call: Callable[[], Result]) -> Result:
        try:
            return call()
        except OSError as error:
            message = f"{error.strerror} (offload_folder, where saved values wait)"
            raise OSError(error.errno, message, str(self.parent)) from error

    def _reserve(self, size: int) -> Path:
        """Make a file with room for ``size`` bytes, and return its path."""
        path = self.folder / str(self.file_count)
        self.file_count += 1
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

    def _write(self, path: Path, slot: Tensor, size: int, copied: torch.Event | None) -> None:
        try:
            if copied is not None:
                copied.synchronize()
            unwritten = slot[:size].numpy().data
            with path.open("r+b", buffering=0) as file:
                while unwritten:
                    unwritten = unwritten[file.write(unwritten) :]
        finally:
            self.slots.put(slot)

    def _read(self, stored: StoredValue, room: Tensor, started: torch.Event | None) -> torch.Event | None:
        stored.written.result()
        if self.last is not None:
            self.last.synchronize()
        if self.arrived.nbytes < room.nbytes:
            self.arrived = self._room(room.nbytes, room.device)
        missing = self.arrived[: room.nbytes].numpy().data
        with stored.path.open("rb", buffering=0) as file:
            while missing:
                if not (count := file.readinto(missing)):
                    raise OSError(errno.EIO, "a file is shorter than it was")
                missing = missing[count:]
        source = _like(self.arrived, room)
        if started is None:
            room.copy_(source)
            return None
        stream = self.copies.stream(room.device, "read")
        stream.wait_event(started)
        with stream:
            room.copy_(source, non_blocking=True)
        self.last = stream.record_event()
        return self.last


def _like(slot: Tensor, x: Tensor) -> Tensor:
    """Return a view of ``slot`` with the layout of ``x``."""
    return slot[: x.nbytes].view(x.dtype).as_strided(x.shape, x.stride())


def _own_folder(parent: Path, rank: int) -> tuple[Path, int]:
    """Make a folder and lock it; return both. Remove folders of other processes whose locks are free."""
    for lock in parent.glob(f"quintnet-*/{LOCK}"):
        _remove_unused(lock)
    folder = Path(tempfile.mkdtemp(prefix=f"quintnet-{rank}-", dir=parent))
    descriptor = os.open(folder / "new", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    (folder / "new").rename(folder / LOCK)
    return folder, descriptor


def _remove_unused(lock: Path) -> None:
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except OSError:  # it has just been removed, or belongs to another user
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(lock.parent, ignore_errors=True)
    except BlockingIOError:
        pass
    finally:
        os.close(descriptor)


def _remove(path: Path, files: set[Path], process: int) -> None:
    """Remove a file, in the process that made it: a fork has a copy of the same objects."""
    if os.getpid() == process:
        files.discard(path)
        path.unlink(missing_ok=True)


def _close(folder: Path, lock: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
