"""Calls in which all ranks take part: each is announced to the others before it communicates.

A rank counts its calls. Before a call it writes number and kind where the ranks of its machine see it
(:mod:`.board`); ten times a second they go to the store, where all do. Two ranks whose calls of one number are of
different kinds would wait for each other forever, or mix up their messages: that is an error, with both of the user's
lines (:mod:`.disagreement`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from ...core.errors import QuintNetError
from ..threads.turns import Turn
from .heartbeat import CollectiveCall, Heartbeat, here
from .rank_status import OTHERS, described, of_communication

P = ParamSpec("P")
T = TypeVar("T")
Self = TypeVar("Self", bound="Labelled")
NAMES = {  # what runs of a program are called
    "train": "step", "evaluate": "evaluate", "parts": "evaluate_together", "outputs": "program(...)"
}  # fmt: skip


def running(
    known: dict[Any, Any],
    step: int,
    kind: str,
    local: bool,
    batch: Callable[[], Any],
    *,
    name: str = "",
    label: str = "",
) -> contextlib.AbstractContextManager[None]:
    """One run of a program on every rank. What fails in it because of another rank says so.

    Args:
        known: what the program's runs of each kind were given last.
        batch: what this one is given; it is asked where there are other ranks to compare with.
        name: of the call, if it is not that of the kind.
        label: see :func:`next_label`.

    Raises:
        InputError: QN102 on every rank, if they were given different batches.
        RunError: QN401 if another rank is in another call, QN402 if communication fails.
    """
    pulse = here()
    if pulse is None or pulse.inside:
        return contextlib.nullcontext()
    number = step if kind == "train" else None
    call = CollectiveCall(pulse.now.number + 1, name or NAMES[kind], label, described(batch()), number, users_line())
    return _together(pulse, call, known, kind, local)


def announced(name: str, label: str = "", given: Callable[[], Any] = tuple) -> contextlib.AbstractContextManager[None]:
    """A call ``name`` of every rank, in which they communicate: one that is within another of them is part of it.

    Args:
        given: what ranks must have in common.

    Raises:
        InputError: QN102 on every rank, if they were given something else.
        RunError: QN401 if another rank is in another call, QN402 if one does not come, or if communication fails.
    """
    pulse = here()
    if pulse is None or pulse.inside:
        return contextlib.nullcontext()
    return _together(
        pulse, CollectiveCall(pulse.now.number + 1, name, label, described(given()), None, users_line()), {}
    )


class Labelled(Protocol):
    """Has a label, see :func:`next_label`, and is run by one thread at a time."""

    @property
    def _label(self) -> str: ...

    @property
    def _turn(self) -> Turn: ...


def collective(method: Callable[Concatenate[Self, P], T]) -> Callable[Concatenate[Self, P], T]:
    """A method that every rank calls, and in which they communicate: see :func:`announced`."""

    @functools.wraps(method)
    def together(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self._turn, announced(method.__name__, self._label):
            return method(self, *args, **kwargs)

    return together


def next_label() -> str:
    """What tells a program's calls from those of the programs that were set up before it: "" for the first one. All
    ranks set their programs up in one order, as they communicate in it."""
    pulse = here()
    if pulse is None:
        return ""
    pulse.programs += 1
    return f" of program {pulse.programs}" if pulse.programs > 1 else ""


def frequent(name: str, label: str = "") -> contextlib.AbstractContextManager[None]:
    """As :func:`announced`, for what training does in each step: ranks wait for each other the first time only."""
    pulse = here()
    if pulse is None or pulse.inside:
        return contextlib.nullcontext()
    return _together(
        pulse, CollectiveCall(pulse.now.number + 1, name, label, (), None, users_line()), pulse.usual, name, label
    )


@contextlib.contextmanager
def _together(pulse: Heartbeat, call: CollectiveCall, known: dict[Any, Any], *key: Any) -> Iterator[None]:
    """``known``: what was given last, by ``key``. Ranks wait for each other where it was something else."""
    pulse.inside = True
    try:
        pulse.begin(call, usual=known.get(key) == call.given)
        known[key] = call.given
        try:
            yield
        except RuntimeError as error:
            own = isinstance(error, QuintNetError) and error.code != "QN402"
            if own or not of_communication(error):
                raise
            raise pulse.cause(error) from error
    finally:
        pulse.inside = False


def users_line() -> tuple[str, int]:
    """File and number of the innermost line on the way here that is neither Python's, torch's nor ours."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith(OTHERS):
            return file, frame.f_lineno
        frame = frame.f_back
    return "", 0
