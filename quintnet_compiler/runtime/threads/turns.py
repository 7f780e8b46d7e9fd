"""Locks that let one thread at a time run the programs of a module.

The programs of a module share parameters and gradients. Where all ranks are in this process, a second thread waits for
the first one, unless that waits for it: a hook of each calls the other's program. Where each rank is a process, threads
would run in different orders on different ranks and mix up their communication, so the second thread is refused.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar
from weakref import WeakSet

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ...compat.interpreter import call_once
from ...compat.torch_hooks import runs_backward
from ...core.errors import RunError

P = ParamSpec("P")
T = TypeVar("T")
_ORDER = itertools.count()


class Turn(Protocol):
    """A reentrant lock: a context that one thread at a time may enter."""

    def __enter__(self) -> object: ...

    def __exit__(self, *error: object) -> object: ...


class HasTurn(Protocol):
    """An object whose methods one thread at a time may run."""

    @property
    def _turn(self) -> Turn: ...


Self = TypeVar("Self", bound=HasTurn)


@dataclass
class Waits:
    """Which lock each thread waits for, by the thread's number. ``guard``: one thread at a time looks for a circle."""

    turns: dict[int, LocalTurn] = field(default_factory=dict)
    guard: threading.Lock = field(default_factory=threading.Lock)


class LocalTurn:
    """The lock of programs whose ranks are all in this process: threads wait for it.

    Attributes:
        number: says in which order several locks are acquired.
        waits: of all locks.
        holder: the number of the thread that has the lock, else 0. It is set after the lock is acquired, and unset
            before it is released.
        depth: how many times that thread has entered.
    """

    def __init__(self, waits: Waits) -> None:
        """Number the lock."""
        self.number = next(_ORDER)
        self.waits = waits
        self.lock = threading.RLock()
        self.holder, self.depth = 0, 0

    def __enter__(self) -> None:
        """Acquire the lock.

        Raises:
            RunError: QN113 if its thread waits, through others or not, for a lock that this thread has; and on a thread
                of autograd, for which that thread may wait.
        """
        thread = threading.get_ident()
        if not self.lock.acquire(blocking=False):
            self._wait(thread)
        self.holder = thread
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1
        if not self.depth:
            self.holder = 0
        self.lock.release()

    def _wait(self, thread: int) -> None:
        """Acquire the lock of another thread, after saying that ``thread`` waits for it."""
        waiting = self.waits.turns
        waiting[thread] = self
        try:
            if self.holder:
                self._require_end(thread)
                _refuse_autograd_thread()
            self.lock.acquire()
        finally:
            waiting.pop(thread, None)

    def fork(self) -> None:
        """Release the lock in a forked process, where threads that held it do not exist."""
        if self.lock.acquire(blocking=False):
            self.lock.release()
        else:
            self.lock, self.holder, self.depth = threading.RLock(), 0, 0

    def _require_end(self, thread: int) -> None:
        """Refuse to let ``thread`` wait for this lock if it would wait for itself.

        Each thread says for which lock it waits before it waits, so the last one of a circle sees all of it.

        Raises:
            RunError: QN113, naming the threads.
        """
        with self.waits.guard:
            circle = self._circle(thread)
            if not circle:
                return
            del self.waits.turns[thread]  # for the others it is no circle any more
        mine = f"thread {_name(thread)}"
        others = ", which waits for one that ".join(f"thread {_name(turn.holder)} runs" for turn in circle[:-1])
        raise RunError(
            "QN113",
            f"{mine} would wait for a program that {others}, which waits for one that {mine} runs: none would go on",
            fix="call no program of another module while one runs, for example in a hook, or use one thread",
        )

    def _circle(self, thread: int) -> list[LocalTurn]:
        """Return this lock, that which its holder waits for, and so on to one of ``thread``; none if it has an end."""
        waiting = self.waits.turns
        circle = [self]
        while circle[-1].holder != thread:
            following = waiting.get(circle[-1].holder)
            if following is None or following in circle:
                return []
            circle.append(following)
        # others may have gone on meanwhile; from the lock of this thread backwards, each one seen to wait cannot
        for turn, following in reversed(list(itertools.pairwise(circle))):
            holder = turn.holder
            if waiting.get(holder) is not following or turn.holder != holder:
                return []
        return circle


def _refuse_autograd_thread() -> None:
    """Refuse to wait in a hook on a thread of autograd's own: nothing says which thread waits for that backward.

    Backwards on CPUs run on the thread that called them; those of accelerators, and those of more than 60 backwards in
    one another, do not.

    Raises:
        RunError: QN113.
    """
    if runs_backward() and isinstance(threading.current_thread(), threading._DummyThread):
        raise RunError(
            "QN113",
            "a hook on a thread of autograd would wait for a program that another thread runs, which may wait for this "
            "backward",
            fix="call the program after the backward, in the thread that called it",
        )


class LocalTurns:
    """The locks of a program that shares parameters with several others, acquired in the order of their numbers."""

    def __init__(self, turns: Iterable[LocalTurn]) -> None:
        """Sort the locks."""
        self.turns = sorted(turns, key=lambda turn: turn.number)

    def __enter__(self) -> None:
        taken = 0
        try:
            for turn in self.turns:
                turn.__enter__()
                taken += 1
        except BaseException:  # for example KeyboardInterrupt while it waits
            self._leave(taken)
            raise

    def __exit__(self, *error: object) -> None:
        self._leave(len(self.turns))

    def _leave(self, number: int) -> None:
        for turn in reversed(self.turns[:number]):
            turn.__exit__()


class WorldTurn:
    """The lock of all programs of which each rank is a process: a second thread is refused."""

    def __init__(self) -> None:
        """Make the lock of this process."""
        self.process, self.thread = os.getpid(), 0
        self.lock = threading.RLock()

    def __enter__(self) -> None:
        """Acquire the lock.

        Raises:
            RunError: QN113 in a second thread, and in a process that was forked from a rank.
        """
        if self.process != os.getpid():
            raise RunError(
                "QN113",
                f"this process was forked from a rank, process {self.process}, and has no connection to other ranks",
                fix="run the program in the rank itself; a copy.deepcopy of the module, before it is compiled, can be "
                "compiled for a mesh of one rank",
            )
        if not self.lock.acquire(blocking=False):
            raise RunError(
                "QN113",
                f"thread {_name(threading.get_ident())} runs a program while thread {_name(self.thread)} does, and "
                "each rank is a process: threads may come in another order on other ranks",
                fix="run programs in one thread, or one after the other",
            )
        self.thread = threading.get_ident()

    def __exit__(self, *error: object) -> None:
        self.lock.release()


@dataclass
class Turns:
    """The locks of modules, parameters and buffers, as long as those live.

    Attributes:
        guard: protects the others.
        by_part: the lock of each module, parameter and buffer.
        all: all locks.
        waits: of all threads.
    """

    guard: threading.Lock = field(default_factory=threading.Lock)
    by_part: Any = field(default_factory=WeakIdKeyDictionary)
    all: WeakSet[LocalTurn] = field(default_factory=WeakSet)
    waits: Waits = field(default_factory=Waits)

    def lock_for(self, parts: Collection[object]) -> LocalTurn | LocalTurns:
        """Return the lock of programs that read ``parts``: a new one, or the locks of all programs that share some."""
        with self.guard:
            turns: set[LocalTurn] = {turn for x in parts if (turn := self.by_part.get(x)) is not None}
            if not turns:
                turns = {LocalTurn(self.waits)}
                self.all |= turns
            first = min(turns, key=lambda turn: turn.number)
            for x in parts:
                self.by_part.setdefault(x, first)
        return first if len(turns) == 1 else LocalTurns(turns)

    def fork(self) -> None:
        """Release all locks in a forked process."""
        self.guard = threading.Lock()
        self.waits.turns.clear()
        self.waits.guard = threading.Lock()
        for turn in list(self.all):
            turn.fork()


@call_once
def _turns() -> Turns:
    turns = Turns()
    os.register_at_fork(after_in_child=turns.fork)
    return turns


def turn_of(modules: Sequence[nn.Module]) -> LocalTurn | LocalTurns:
    """Return the lock of programs of ``modules``, shared by all that read the same parameter, buffer or submodule."""
    parts: dict[int, object] = {id(module): module for module in modules}
    for part in (part for module in modules for part in module.modules()):
        tensors = [x for x in (*part._parameters.values(), *part._buffers.values()) if x is not None]
        parts |= {id(x): x for x in (part, *tensors)} if tensors else {}
    return _turns().lock_for(parts.values())


def all_turns(*turns: Turn) -> Turn:
    """Return a lock for several locks at once, without deadlock between threads that acquire the same ones."""
    world = next((turn for turn in turns if isinstance(turn, WorldTurn)), None)
    if world is not None:
        return world
    groups = [turn.turns if isinstance(turn, LocalTurns) else [turn] for turn in turns]
    return LocalTurns({turn for group in groups for turn in group if isinstance(turn, LocalTurn)})


@call_once
def turn_of_world() -> WorldTurn:
    """Return the lock of all programs of this process that communicate with other processes."""
    return WorldTurn()


def in_turn(method: Callable[Concatenate[Self, P], T]) -> Callable[Concatenate[Self, P], T]:
    """Let one thread at a time run a method, see :class:`LocalTurn` and :class:`WorldTurn`."""

    @functools.wraps(method)
    def locked(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._turn:
            return method(self, *args, **kwargs)

    return locked


def _name(thread: int) -> str:
    return next(
        (repr(candidate.name) for candidate in threading.enumerate() if candidate.ident == thread), "another thread"
    )
