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
from .heartbeat import CollectiveCall, Heartbeat, current_heartbeat
from .rank_status import OTHERS, described, of_communication

P = ParamSpec("P")
T = TypeVar("T")
Self = TypeVar("Self", bound="Labelled")
NAMES = {  # what runs of a program are called
    "train": "step", "evaluate": "evaluate", "parts": "evaluate_together", "outputs": "program(...)"
}  # fmt: skip


def running(
    last: dict[Any, Any],
    step: int,
    kind: str,
    local: bool,
    batch: Callable[[], Any],
    *,
    name: str = "",
    label: str = "",
) -> contextlib.AbstractContextManager[None]:
    """Return a context of one run of a program on every rank; an error in it that another rank caused says so.

    Args:
        last: the batches of the program's last run of each kind.
        step: its number.
        kind: of the run.
        local: whether the batch is this data rank's.
        batch: returns the batch; called where there are other ranks to compare with.
        name: of the call, if it is not that of the kind.
        label: see :func:`next_label`.

    Raises:
        InputError: QN102 on every rank, if they were given different batches.
        RunError: QN401 if another rank is in another call, QN402 if communication fails.
    """
    pulse = current_heartbeat()
    if pulse is None or pulse.inside:
        return contextlib.nullcontext()
    number = step if kind == "train" else None
    arguments = {"batch of this data rank": described(batch())} if local else described(batch())
    call = CollectiveCall(pulse.now.number + 1, name or NAMES[kind], label, arguments, number, users_line())
    return _together(pulse, call, last, kind, local)


def announced(name: str, label: str = "", given: Callable[[], Any] = tuple) -> contextlib.AbstractContextManager[None]:
    """Return a context of a call of every rank, in which they communicate; one within another is part of that.

    Args:
        name: of the call.
        label: see :func:`next_label`.
        given: returns what ranks must have in common.

    Raises:
        InputError: QN102 on every rank, if they were given something else.
        RunError: QN401 if another rank is in another call, QN402 if one does not come, or if communication fails.
    """
    pulse = current_heartbeat()
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
    """Return a label that differs between the programs of a process: "" for the first one.

    All ranks set their programs up in one order, as they communicate in it.
    """
    pulse = current_heartbeat()
    if pulse is None:
        return ""
    pulse.programs += 1
    return f" of program {pulse.programs}" if pulse.programs > 1 else ""


def frequent(name: str, label: str = "") -> contextlib.AbstractContextManager[None]:
    """As :func:`announced`, for what training does in each step: ranks wait for each other the first time only."""
    pulse = current_heartbeat()
    if pulse is None or pulse.inside:
        return contextlib.nullcontext()
    return _together(
        pulse, CollectiveCall(pulse.now.number + 1, name, label, (), None, users_line()), pulse.usual, name, label
    )


@contextlib.contextmanager
def _together(pulse: Heartbeat, call: CollectiveCall, last: dict[Any, Any], *key: Any) -> Iterator[None]:
    """Run a call; ranks wait for each other where its arguments differ from the ``last`` ones of this ``key``."""
    pulse.inside = True
    try:
        pulse.begin_call(call, usual=last.get(key) == call.given)
        last[key] = call.given
        try:
            yield
        except RuntimeError as error:
            coded = isinstance(error, QuintNetError) and error.code != "QN402"
            if coded or not of_communication(error):
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
