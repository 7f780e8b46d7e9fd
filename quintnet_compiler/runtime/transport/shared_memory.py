"""Messages between two processes of one host: through memory that both have, and a socket that tells what is there.

Over gloo, a message is copied into the kernel and out of it, and three threads are woken at each end. Here it is copied
once, and the other process is woken if it waits: it looks for a message a few times before it sleeps, since ranks that
compute alike are ready at about the same time, and to wake one takes longer than many a message.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import secrets
import select
import socket
import struct
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...compat.distributed import timeout_of
from .transport import Pending

LARGEST = 2**20  # bytes of a message: larger ones gain nothing, and would need as much memory again
SMALLEST = 2**12  # of a block
LONGEST = 2**16  # bytes of what is told
NONE = 2**64 - 1  # no block
FILE = socket.CMSG_LEN(array("i").itemsize)  # bytes beside a message that brings a file
SECRET = 16  # bytes that only the two processes know
ANSWER = 5.0  # seconds until which a call that has been made is there
LOOKS = 64  # for a message, each of about a microsecond, before one sleeps until it comes
MOST_VIEWS = 64  # of a block


@dataclass(frozen=True)
class MessageBlock:
    """Memory of one message at a time, and the tensors that have been at its beginning: they are made once."""

    memory: Tensor
    views: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    def view(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for a tensor."""
        key = (dtype, *shape)
        found = self.views.get(key)
        if found is None:
            if len(self.views) == MOST_VIEWS:
                self.views.clear()
            found = self.memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            self.views[key] = found
        return found


class MemoryLink:
    """One end of a connection to another process.

    What one end puts is copied to a block of its memory that holds nothing unread. A message is the numbers of the
    block, of bytes, and of the other end's blocks that were read since; a new block's file comes with its first
    message. What one end puts, the other takes in the same order, and may wait for in any.

    ``seconds``: how long the other end is waited for; ``both``: both ends put, in turns. Else blocks that were read are
    given back at once, with a message that has none of its own.
    """

    def __init__(self, connection: socket.socket, seconds: float, *, both: bool = True) -> None:
        weakref.finalize(self, connection.close)
        connection.setblocking(True)
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))  # a timeval
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, limit)
        self.connection, self.seconds, self.both, self.looks = connection, seconds, both, LOOKS
        self.poll = select.poll()
        self.poll.register(connection, select.POLLIN)
        self.own: list[MessageBlock] = []
        self.free: dict[int, list[int]] = {}  # by size: own blocks that hold nothing unread
        self.others: list[MessageBlock] = []
        self.read: list[int] = []  # the other's blocks that were read since the last message
        self.taken = self.heard = 0  # what the other put: how much is or was waited for, and how much is there
        self.there: dict[int, tuple[int, int]] = {}  # of that: the other's block, and how many bytes are in it

    def exchange(self, x: Tensor, made: Callable[[Tensor], Any]) -> Pending:
        """Call :meth:`put`, and :meth:`take` what the other end puts, which is like ``x``."""
        self.put(x)
        return self.take(x.shape, x.dtype, made)

    def put(self, x: Tensor) -> None:
        """Send ``x`` (contiguous, at most :data:`LARGEST` bytes), which may change then."""
        size = max(SMALLEST, 1 << (x.nbytes - 1).bit_length())
        free, files = self.free.setdefault(size, []), []
        if not free and not self.both:
            self._hear_all()
        if not free:
            free.append(len(self.own))
            files.append(os.memfd_create("quintnet"))
            os.ftruncate(files[0], size)
            self.own.append(_mapped(files[0]))
        block = free.pop()
        self.own[block].view(x.shape, x.dtype).copy_(x)
        self._say(block, x.nbytes, files)

    def take(self, shape: Sequence[int], dtype: torch.dtype, made: Callable[[Tensor], Any]) -> Pending:
        """Return a wait for the result of ``made`` for the other end's next tensor, which is valid during that call."""
        number, self.taken = self.taken, self.taken + 1

        def wait() -> Any:
            while number not in self.there:
                self._hear()
            block, count = self.there.pop(number)
            if count != math.prod(shape) * dtype.itemsize:
                what = f"{str(dtype).removeprefix('torch.')}{list(shape)}"
                raise dist.DistError(f"{what} is expected of another rank, which sent {count} bytes")
            result = made(self.others[block].view(shape, dtype))
            self.read.append(block)
            if not self.both:
                self._say(NONE, 0, [])
            return result

        return wait

    def _say(self, block: int, count: int, files: list[int]) -> None:
        message = array("Q", [block, count, *self.read]).tobytes()
        self.read.clear()
        try:
            if files:
                socket.send_fds(self.connection, [message], files)
            else:
                self.connection.send(message)
        except BlockingIOError:
            raise dist.DistError(f"timed out after {self.seconds} s in which another rank took nothing") from None
        except OSError as error:
            raise dist.DistNetworkError(f"Connection closed by peer: {error}") from None
        finally:
            for file in files:
                os.close(file)

    def _hear(self, flags: int = 0) -> None:
        """Wait for the next message."""
        try:
            message, beside, _, _ = self._received(flags) if flags else self._looked_for()
        except BlockingIOError:
            if flags:
                raise
            raise dist.DistError(f"timed out after {self.seconds} s of waiting for another rank") from None
        except OSError as error:
            raise dist.DistNetworkError(f"Connection closed by peer: {error}") from None
        if not message:
            raise dist.DistNetworkError("Connection closed by peer")
        for _, _, data in beside:
            (file,) = array("i", data)
            self.others.append(_mapped(file))
            os.close(file)
        block, count, *free = array("Q", message)
        for own in free:
            self.free[self.own[own].memory.numel()].append(own)
        if block != NONE:
            self.there[self.heard] = block, count
            self.heard += 1

    def _looked_for(self) -> Any:
        """The next message. Where one looked in vain, one looks half as often the next time: where other processes need
        the cores, too, the other end does not run, and may be waiting for this one's core."""
        for _ in range(self.looks):
            if self.poll.poll(0):
                self.looks = min(2 * self.looks, LOOKS)
                break
        else:
            self.looks = max(self.looks // 2, 1)
        return self._received(0)

    def _received(self, flags: int) -> Any:
        # not socket.recv_fds, which drops the flags (Python 3.11)
        return self.connection.recvmsg(LONGEST, FILE, flags)

    def _hear_all(self) -> None:
        """Messages that are there."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._hear(socket.MSG_DONTWAIT)


def _mapped(file: int) -> MessageBlock:
    """The memory of a file."""
    return MessageBlock(torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8))


def fits(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a tensor is one that links are for."""
    return device.type == "cpu" and math.prod(shape) * dtype.itemsize <= LARGEST


def link(group: dist.ProcessGroup, *, both: bool = True) -> MemoryLink | None:
    """Return the connection of the two ranks of ``group``, see :class:`MemoryLink`. Both ranks must call this.

    None where they are on different hosts (or in containers that see no sockets of each other), or not on Linux.
    """
    door = _socket()
    if not all(_told(group, door is not None)) or door is None:
        return None
    with door:
        if group.rank() == 0:
            door.bind("")  # Linux chooses a name, which goes with the socket
            door.listen()
        name, secret = _told(group, (door.getsockname(), secrets.token_bytes(SECRET)))[0]
        made = _called(name, secret) if group.rank() == 1 else None
        if not _told(group, made is not None)[1]:
            return None
        if group.rank() == 0:
            made = _answered(door, secret)
        if not _told(group, made is not None)[0] or made is None:
            return None
        return MemoryLink(made, timeout_of(group), both=both)


def _told(group: dist.ProcessGroup, mine: Any) -> list[Any]:
    """What both ranks have to say."""
    found: list[Any] = [None, None]
    dist.all_gather_object(found, mine, group=group)
    return found


def _socket() -> socket.socket | None:
    if not hasattr(os, "memfd_create"):
        return None
    try:
        return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError:
        return None


def _called(name: bytes, secret: bytes) -> socket.socket | None:
    """Connected to the process that listens at ``name``, if there is one here."""
    made = _socket()
    assert made is not None
    try:
        made.connect(name)
        made.send(secret)
    except OSError:
        made.close()
        return None
    return made


def _answered(door: socket.socket, secret: bytes) -> socket.socket | None:
    """The connection of the process that knows the secret: it has called already, if it could call this one."""
    door.settimeout(ANSWER)
    while True:
        try:
            made, _ = door.accept()
            made.settimeout(ANSWER)
            if secrets.compare_digest(made.recv(SECRET), secret):
                return made
            made.close()
        except TimeoutError:
            return None
