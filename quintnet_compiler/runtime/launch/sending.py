"""What the launching process and its ranks send each other: the function with its arguments, and results.

All of it is pickled: either side started the other, and nothing is read from anybody else. Functions and classes of
modules go by name. What has no name that the other side could import (lambdas, closures, what a notebook or a script on
stdin defines) goes by value, with cloudpickle.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import pickle
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import cloudpickle

from ...core.errors import QuintNetError, RunError

LOOPBACK = "127.0.0.1"
ANSWERS = 3.0  # seconds in which a machine reaches itself
RANKS_MAIN = "__mp_main__"  # what multiprocessing calls the script that a rank imports
LAUNCHES_AGAIN = 78  # exit code of a rank whose import of the script launches ranks; EX_CONFIG of sysexits.h


def packed(x: Any) -> bytes:
    """Raises: whatever pickle raises for what cannot be pickled."""
    if _has_script():
        try:
            return pickle.dumps(x)
        except QuintNetError:
            raise
        except Exception:  # of many kinds; cloudpickle may do better
            pass
    return bytes(cloudpickle.dumps(x))


def unpacked(data: bytes) -> Any:
    """Return what was packed in a process that this one started, or that started this one."""
    return pickle.loads(data)


@dataclass(frozen=True)
class PackedCall:
    """A function and its arguments, for other processes."""

    data: bytes

    def __call__(self) -> Any:
        fn, args = unpacked(self.data)
        return fn(*args)


def packed_call(fn: Callable[..., Any], args: Sequence[Any]) -> PackedCall:
    """Pack ``fn(*args)`` for other processes; values of tensors are copied.

    Raises:
        RunError: QN307 for what cannot be pickled: which argument, or which variable of ``fn``.
    """
    try:
        return PackedCall(packed((fn, tuple(args))))
    except Exception as error:
        name, cause = next(_refused(fn, args), ("the function", error))
        reason = cause.message if isinstance(cause, QuintNetError) else str(cause)
        raise RunError(
            "QN307",
            f"{name} cannot be sent to other processes: {reason}",
            fix="make it inside the function: ranks are processes of their own, and each needs one of its own",
        ) from error


def launched_by_import(frame: FrameType | None) -> bool:
    """Return whether a rank imports the script that launched it, at ``frame`` or in a caller of it."""
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == RANKS_MAIN:
            return True
        frame = frame.f_back
    return False


@contextlib.contextmanager
def importable_main() -> Iterator[None]:
    """While inside, processes that are started import the main module only if it has a file: that of a script on stdin
    is called ``<stdin>``."""
    main = sys.modules["__main__"]
    names = () if _has_script() else {"__file__"} & main.__dict__.keys()
    hidden = {name: main.__dict__.pop(name) for name in names}
    try:
        yield
    finally:
        main.__dict__.update(hidden)


@contextlib.contextmanager
def needs_fork_server(rank: int) -> Iterator[None]:
    """While inside, the process of ``rank`` is started by multiprocessing's fork server.

    Raises:
        RunError: QN307 if that process ends before it has.
    """
    try:
        yield
    except (EOFError, ConnectionError) as error:
        raise RunError(
            "QN307",
            f"multiprocessing's fork server, which starts ranks, ended before it had started rank {rank}",
            fix="see what it wrote to stderr, and in the system's log whether it was killed for want of memory",
        ) from error


def _has_script() -> bool:
    """Return whether other processes can import what this one's main module defines."""
    main = sys.modules["__main__"]
    return getattr(main, "__spec__", None) is not None or os.path.exists(getattr(main, "__file__", None) or "")


def _refused(fn: Callable[..., Any], args: Sequence[Any]) -> Iterator[tuple[str, Exception]]:
    """Yield the parts that cannot be packed, and why."""
    parts = {f"argument {number}": x for number, x in enumerate(args)}
    if inspect.isfunction(fn):
        variables = inspect.getclosurevars(fn)
        used = {**variables.globals, **variables.nonlocals}
        parts |= {f"{name}, which {fn.__name__} uses,": x for name, x in used.items()}
    for name, x in parts.items():
        try:
            packed(x)
        except Exception as error:
            yield name, error


def local_listener(waiting: int) -> socket.socket:
    """Return a socket on which ranks meet.

    Raises:
        RunError: QN307 if this machine cannot talk to itself: torch would try it for minutes.
    """
    try:
        listener = socket.create_server((LOOPBACK, 0), backlog=waiting)
        with socket.create_connection(listener.getsockname(), timeout=ANSWERS):
            listener.accept()[0].close()
    except OSError as error:
        raise RunError(
            "QN307",
            f"this machine has no loopback of IPv4 ({LOOPBACK}), over which ranks talk: {error.strerror or error}",
            fix="ip link set lo up; ip addr add 127.0.0.1/8 dev lo",
        ) from error
    return listener
