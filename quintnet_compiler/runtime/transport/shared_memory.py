"""Messages between two processes of one host: data in shared memory, and a socket that announces it.

Over gloo, a message is copied into the kernel and out of it, and three threads are woken at each end. Here it is copied
once. A receiver polls a few times before it sleeps, since ranks that do the same work are ready at about the same time,
and waking a process often takes longer than the message.
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

MAX_MESSAGE_BYTES = 2**20  # larger ones gain nothing, and would need as much memory again
MIN_BLOCK_BYTES = 2**12
MAX_ANNOUNCEMENT_BYTES = 2**16  # on the socket
NO_BLOCK = 2**64 - 1  # in place of a block's number
DESCRIPTOR_BYTES = socket.CMSG_LEN(array("i").itemsize)  # of ancillary data that passes a file descriptor
SECRET_BYTES = 16  # that only the two processes know
ACCEPT_SECONDS = 5.0  # in which a connection that was made has arrived
MAX_POLLS = 64  # for a message, each of about a microsecond, before a receiver sleeps
MAX_VIEWS = 64  # of a block


@dataclass(frozen=True)
class MessageBlock:
    """Shared memory of one message at a time, with a cache of the tensors that view it."""

    memory: Tensor
    views: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    def view(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return the beginning of the memory as a tensor."""
        key = (dtype, *shape)
        tensor = self.views.get(key)
        if tensor is None:
            if len(self.views) == MAX_VIEWS:
                self.views.clear()
            tensor = self.memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
            self.views[key] = tensor
        return tensor


class MemoryLink:
    """One end of a connection to another process.

    A tensor that one end puts is copied to a block of its memory that holds nothing unread, and announced on the
    socket: the block's number, the number of bytes, and the other end's blocks that were read since the last
    announcement. The file of a new block comes with its first announcement. The other end takes tensors in the same
    order, and may wait for them in any.

    ``seconds``: how long to wait for the other end. ``both``: both ends put, in turns; else blocks that were read are
    returned at once, by an announcement without a block.
    """

    def __init__(self, connection: socket.socket, seconds: float, *, both: bool = True) -> None:
        weakref.finalize(self, connection.close)
        connection.setblocking(True)
        limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))  # a timeval
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, limit)
        self.connection, self.seconds, self.both, self.polls = connection, seconds, both, MAX_POLLS
        self.poll = select.poll()
        self.poll.register(connection, select.POLLIN)
        self.own: list[MessageBlock] = []
        self.free: dict[int, list[int]] = {}  # by size: blocks of this end that hold nothing unread
        self.others: list[MessageBlock] = []
        self.read: list[int] = []  # blocks of the other end that were read since the last announcement
        self.taken = 0  # number of tensors of the other end that were asked for
        self.heard = 0  # number of tensors of the other end that were announced
        self.there: dict[int, tuple[int, int]] = {}  # announced and not taken: block and number of bytes

    def exchange(self, x: Tensor, read: Callable[[Tensor], Any]) -> Pending:
        """Send ``x``, and receive a tensor like it: see :meth:`send_tensor` and :meth:`receive_next`."""
        self.send_tensor(x)
        return self.receive_next(x.shape, x.dtype, read)

    def send_tensor(self, x: Tensor) -> None:
        """Send ``x`` (contiguous, at most :data:`MAX_MESSAGE_BYTES` bytes), which may change afterwards."""
        size = max(MIN_BLOCK_BYTES, 1 << (x.nbytes - 1).bit_length())
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
        self._announce(block, x.nbytes, files)

    def receive_next(self, shape: Sequence[int], dtype: torch.dtype, read: Callable[[Tensor], Any]) -> Pending:
        """Return a wait that calls ``read`` with the other end's next tensor, and returns its result.

        The tensor is valid during that call.
        """
        number, self.taken = self.taken, self.taken + 1

        def wait() -> Any:
            while number not in self.there:
                self._hear()
            block, count = self.there.pop(number)
            if count != math.prod(shape) * dtype.itemsize:
                expected = f"{str(dtype).removeprefix('torch.')}{list(shape)}"
                raise dist.DistError(f"{expected} is expected of another rank, which sent {count} bytes")
            result = read(self.others[block].view(shape, dtype))
            self.read.append(block)
            if not self.both:
                self._announce(NO_BLOCK, 0, [])
            return result

        return wait

    def _announce(self, block: int, count: int, files: list[int]) -> None:
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
        """Receive the next announcement; with MSG_DONTWAIT in ``flags``, raise BlockingIOError if there is none."""
        try:
            message, ancillary, _, _ = self._receive(flags) if flags else self._poll_and_receive()
        except BlockingIOError:
            if flags:
                raise
            raise dist.DistError(f"timed out after {self.seconds} s of waiting for another rank") from None
        except OSError as error:
            raise dist.DistNetworkError(f"Connection closed by peer: {error}") from None
        if not message:
            raise dist.DistNetworkError("Connection closed by peer")
        for _, _, data in ancillary:
            (file,) = array("i", data)
            self.others.append(_mapped(file))
            os.close(file)
        block, count, *free = array("Q", message)
        for number in free:
            self.free[self.own[number].memory.numel()].append(number)
        if block != NO_BLOCK:
            self.there[self.heard] = block, count
            self.heard += 1

    def _poll_and_receive(self) -> Any:
        """Poll for the next announcement, then sleep until it comes.

        After polling in vain, the next call polls half as often: where more processes run than there are cores, the
        other end may be waiting for this one's core.
        """
        for _ in range(self.polls):
            if self.poll.poll(0):
                self.polls = min(2 * self.polls, MAX_POLLS)
                break
        else:
            self.polls = max(self.polls // 2, 1)
        return self._receive(0)

    def _receive(self, flags: int) -> Any:
        # not socket.recv_fds, which drops the flags (Python 3.11)
        return self.connection.recvmsg(MAX_ANNOUNCEMENT_BYTES, DESCRIPTOR_BYTES, flags)

    def _hear_all(self) -> None:
        """Receive all announcements that have arrived."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._hear(socket.MSG_DONTWAIT)


def _mapped(file: int) -> MessageBlock:
    """Map a file into memory."""
    return MessageBlock(torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8))


def link_can_send(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a link can send such a tensor."""
    return device.type == "cpu" and math.prod(shape) * dtype.itemsize <= MAX_MESSAGE_BYTES


def link(group: dist.ProcessGroup, *, both: bool = True) -> MemoryLink | None:
    """Return the connection of the two ranks of ``group``, see :class:`MemoryLink`. Both ranks must call this.

    None where they are on different hosts (or in containers that see no sockets of each other), or not on Linux.
    """
    door = _socket()
    if not all(_exchange_objects(group, door is not None)) or door is None:
        return None
    with door:
        if group.rank() == 0:
            door.bind("")  # Linux chooses a name, which goes with the socket
            door.listen()
        name, secret = _exchange_objects(group, (door.getsockname(), secrets.token_bytes(SECRET_BYTES)))[0]
        connection = _connect(name, secret) if group.rank() == 1 else None
        if not _exchange_objects(group, connection is not None)[1]:
            return None
        if group.rank() == 0:
            connection = _accept(door, secret)
        if not _exchange_objects(group, connection is not None)[0] or connection is None:
            return None
        return MemoryLink(connection, timeout_of(group), both=both)


def _exchange_objects(group: dist.ProcessGroup, mine: Any) -> list[Any]:
    """Return the objects of both ranks."""
    both: list[Any] = [None, None]
    dist.all_gather_object(both, mine, group=group)
    return both


def _socket() -> socket.socket | None:
    if not hasattr(os, "memfd_create"):
        return None
    try:
        return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    except OSError:
        return None


def _connect(name: bytes, secret: bytes) -> socket.socket | None:
    """Connect to the process that listens at ``name`` on this host; return None if there is none."""
    connection = _socket()
    assert connection is not None
    try:
        connection.connect(name)
        connection.send(secret)
    except OSError:
        connection.close()
        return None
    return connection


def _accept(door: socket.socket, secret: bytes) -> socket.socket | None:
    """Accept the connection of the process that knows the secret, which has connected already; None if it has not."""
    door.settimeout(ACCEPT_SECONDS)
    while True:
        try:
            connection, _ = door.accept()
            connection.settimeout(ACCEPT_SECONDS)
            if secrets.compare_digest(connection.recv(SECRET_BYTES), secret):
                return connection
            connection.close()
        except TimeoutError:
            return None
