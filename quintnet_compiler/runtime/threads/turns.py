"""Whose turn it is: of the programs of one module, one thread at a time runs one.

A program runs in memory that is its own, on parameters and gradients that the module's programs share. Where all ranks
are in this process, a second thread waits until the first is done. Where each rank is a process, threads would come in
another order on each rank and take part in each other's communication: the second one is refused.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar
from weakref import WeakSet

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ...core.errors import RunError

P = ParamSpec("P")
T = TypeVar("T")
_ORDER = itertools.count()


class Turn(Protocol):
    """A context in which one thread is at a time; that thread as often as it likes."""

    def __enter__(self) -> object: ...

    def __exit__(self, *error: object) -> object: ...


class HasTurn(Protocol):
    """Is run by one thread at a time."""

    @property
    def _turn(self) -> Turn: ...


Self = TypeVar("Self", bound=HasTurn)


class LocalTurn(type(threading.RLock())):  # type: ignore[misc]  # itself: each step takes it
    """The turn of programs whose ranks are all in this process: threads wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.number = next(_ORDER)

    def fork(self) -> None:
        """In a forked process: threads that were inside stayed behind."""
        if not self._is_owned():
            self._at_fork_reinit()


class LocalTurns:
    """The turns of a program that shares parameters with several others, always taken in one order."""

    def __init__(self, turns: Iterable[LocalTurn]) -> None:
        self.turns = sorted(turns, key=lambda turn: turn.number)

    def __enter__(self) -> None:
        taken = 0
        try:
            for turn in self.turns:
                turn.__enter__()
                taken += 1
        except BaseException:  # Ctrl-C while it waits
            self._leave(taken)
            raise

    def __exit__(self, *error: object) -> None:
        self._leave(len(self.turns))

    def _leave(self, number: int) -> None:
        for turn in reversed(self.turns[:number]):
            turn.__exit__()


class WorldTurn:
    """The turn of all programs of which each rank is a process: a second thread is refused."""

    def __init__(self) -> None:
        self.process, self.thread = os.getpid(), 0
        self.lock = threading.RLock()

    def __enter__(self) -> None:
        """
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
    """The turn of each module, parameter and buffer, as long as that lives."""

    guard: threading.Lock = field(default_factory=threading.Lock)
    known: Any = field(default_factory=WeakIdKeyDictionary)
    all: WeakSet[LocalTurn] = field(default_factory=WeakSet)

    def of(self, parts: Collection[object]) -> LocalTurn | LocalTurns:
        """The turn of whoever reads ``parts``: a new one if nobody else does, those of all others otherwise."""
        with self.guard:
            turns: set[LocalTurn] = {turn for x in parts if (turn := self.known.get(x)) is not None}
            if not turns:
                turns = {LocalTurn()}
                self.all |= turns
            first = min(turns, key=lambda turn: turn.number)
            for x in parts:
                self.known.setdefault(x, first)
        return first if len(turns) == 1 else LocalTurns(turns)

    def fork(self) -> None:
        """In a forked process."""
        self.guard = threading.Lock()
        for turn in list(self.all):
            turn.fork()


@cache
def _turns() -> Turns:
    made = Turns()
    os.register_at_fork(after_in_child=made.fork)
    return made


def turn_of(modules: Sequence[nn.Module]) -> LocalTurn | LocalTurns:
    """The turn of the programs that read ``modules``: that of all programs which share a parameter, a buffer or a part
    of a module with them."""
    parts: dict[int, object] = {id(module): module for module in modules}
    for part in (part for module in modules for part in module.modules()):
        own = [x for x in (*part._parameters.values(), *part._buffers.values()) if x is not None]
        parts |= {id(x): x for x in (part, *own)} if own else {}
    return _turns().of(parts.values())


def all_turns(*turns: Turn) -> Turn:
    """Several turns at once, whichever thread asks for which first."""
    world = next((turn for turn in turns if isinstance(turn, WorldTurn)), None)
    if world is not None:
        return world
    here = [turn.turns if isinstance(turn, LocalTurns) else [turn] for turn in turns]
    return LocalTurns({turn for some in here for turn in some if isinstance(turn, LocalTurn)})


@cache
def turn_of_world() -> WorldTurn:
    """The turn of all programs of this process that communicate with other processes."""
    return WorldTurn()


def in_turn(method: Callable[Concatenate[Self, P], T]) -> Callable[Concatenate[Self, P], T]:
    """A method that one thread at a time is in, see :class:`LocalTurn` and :class:`WorldTurn`."""

    @functools.wraps(method)
    def alone(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._turn:
            return method(self, *args, **kwargs)

    return alone


def _name(thread: int) -> str:
    return next((repr(one.name) for one in threading.enumerate() if one.ident == thread), "another thread")
