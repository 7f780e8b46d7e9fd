"""Messages between two processes of one host: through memory that both have, and a socket that tells what is there.

Over gloo, a message is copied into the kernel and out of it, and three threads are woken at each end. Here it is copied
once, and the other process is woken if it waits.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
from array import array
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...compat.distributed import timeout_of
from .transport import Pending

LARGEST = 2**20  # bytes of a message: larger ones gain nothing, and would need as much memory again
SMALLEST = 2**12  # of a block
SECRET = 16  # bytes that only the two processes know
ANSWER = 5.0  # seconds until which a call that has been made is there


class Link:
    """One end of a connection to another process.

    What one end puts is copied to a block of its memory that holds nothing unread. A message is the numbers of the
    block, of bytes, and of the other end's blocks that were read since; a new block's file comes with its first
    message. Both ends begin exchanges in the same order, and may end them in any.
    """

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        connection.settimeout(seconds)
        self.connection, self.seconds = connection, seconds
        self.own: list[Tensor] = []  # blocks of bytes
        self.free: dict[int, list[int]] = {}  # by size: own blocks that hold nothing unread
        self.others: list[Tensor] = []
        self.read: list[int] = []  # the other's blocks that were read since the last message
        self.begun = self.heard = 0  # exchanges; messages
        self.there: dict[int, tuple[int, int]] = {}  # by exchange: the other's block, and how many bytes are in it

    def exchange(self, x: Tensor, made: Callable[[Tensor], Any]) -> Pending:
        """Send ``x`` (contiguous, at most :data:`LARGEST` bytes) at once. When it is waited for: what is ``made`` of
        the other's, which is only there until ``made`` returns."""
        self._put(x)
        number, self.begun = self.begun, self.begun + 1

        def wait() -> Any:
            block, count = self._arrived(number)
            if count != x.nbytes:
                raise dist.DistError(f"this process exchanges {x.nbytes} bytes, and the other one {count}")
            result = made(_within(self.others[block], x))
            self.read.append(block)
            return result

        return wait

    def _put(self, x: Tensor) -> None:
        size = max(SMALLEST, 1 << (x.nbytes - 1).bit_length())
        free, files = self.free.setdefault(size, []), []
        if not free:
            free.append(len(self.own))
            files.append(os.memfd_create("quintnet"))
            os.ftruncate(files[0], size)
            self.own.append(_mapped(files[0]))
        block = free.pop()
        _within(self.own[block], x).copy_(x)
        message = array("Q", [block, x.nbytes, *self.read]).tobytes()
        self.read.clear()
        try:
            if files:
                socket.send_fds(self.connection, [message], files)
            else:
                self.connection.send(message)
        except TimeoutError:
            raise dist.DistError(f"timed out after {self.seconds} s in which nothing could be sent") from None
        except OSError as error:
            raise dist.DistNetworkError(f"Connection closed by peer: {error}") from None
        finally:
            for file in files:
                os.close(file)

    def _arrived(self, number: int) -> tuple[int, int]:
        """Where the other's message of an exchange is, once it is there."""
        while number not in self.there:
            try:
                message, files, _, _ = socket.recv_fds(self.connection, SMALLEST, 1)
            except TimeoutError:
                raise dist.DistError(f"timed out after {self.seconds} s of waiting for another rank") from None
            except OSError as error:
                raise dist.DistNetworkError(f"Connection closed by peer: {error}") from None
            if not message:
                raise dist.DistNetworkError("Connection closed by peer")
            for file in files:
                self.others.append(_mapped(file))
                os.close(file)
            block, count, *free = array("Q", message)
            for own in free:
                self.free[self.own[own].numel()].append(own)
            self.there[self.heard] = block, count
            self.heard += 1
        return self.there.pop(number)


def _mapped(file: int) -> Tensor:
    """The memory of a file, as bytes."""
    return torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)


def _within(block: Tensor, x: Tensor) -> Tensor:
    """Memory for a tensor like ``x`` at the beginning of ``block``."""
    return block[: x.nbytes].view(x.dtype).view(x.shape)


def link(group: dist.ProcessGroup) -> Link | None:
    """The connection of the two ranks of ``group``; None where they are on different hosts (or in containers that see
    no sockets of each other), or not on Linux. Both ranks must call this."""
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
        return Link(made, timeout_of(group)) if _told(group, made is not None)[0] and made is not None else None


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
    try:
        assert made is not None
        made.connect(name)
        made.send(secret)
    except OSError:
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
