"""Signals by which a scheduler asks a run to end soon."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.util import register_after_fork
from types import FrameType
from typing import Any

from ...compat.interpreter import call_once
from ...core.errors import RunError

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
REQUEUE_EXIT_CODE = 138
"""The exit code of a run that saved itself because it was asked to end, and should be queued again.

It is 128 + SIGUSR1, which Kubeflow's operators (``restartPolicy: ExitCode``) take for a user's own error that may be
retried; a shell's code for a process that SIGTERM ended (143) would not say that a checkpoint was written. Other
schedulers are told which code to requeue (SLURM's ``RequeueExit``, LSF's ``bsub -Q``, a Kubernetes Job's
``podFailurePolicy``).
"""
Handler = Callable[[int], object]
_SENDERS = hasattr(signal, "sigwaitinfo")  # whether this system says who sent a signal; macOS does not


class Preempted(SystemExit):
    """A scheduler has asked this run to end, and its state is saved: the process exits with
    :data:`REQUEUE_EXIT_CODE`."""

    def __init__(self) -> None:
        super().__init__(REQUEUE_EXIT_CODE)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), ()


@dataclass
class Preemption:
    """``asked``: a signal came to this process. ``agreed``: one had come to some rank before the last step ended, which
    every rank knows after the same step: each adds 1 to a sum that the step makes anyway if it was asked."""

    asked: bool = False
    agreed: bool = False

    def ask(self, number: int) -> None:
        self.asked = True

    def hear(self, count: float) -> None:
        """``count``: of ranks that were asked; NaN where gradients were not finite, and a later step will tell."""
        self.agreed = self.agreed or count > 0

    def leave_if_agreed(self, save: Callable[[], object]) -> None:
        """Every rank calls this after a step.

        Raises:
            Preempted: once ``save`` has returned, if the ranks agreed to end.
        """
        if self.agreed:
            save()
            raise Preempted


@contextlib.contextmanager
def handling(signals: Sequence[int], handler: Handler) -> Iterator[None]:
    """Call ``handler`` inside with the number of each of ``signals`` that comes to this process.

    Afterwards they are handled as before. It must do no more than note it: it runs between any two instructions.

    Children that are forked meanwhile get the former handling back when a signal comes to them. Those that
    multiprocessing forks, such as a DataLoader's workers, get it from their parent or themselves alone: what is sent to
    the whole process group is for this process, which still needs them.

    Raises:
        RunError: QN306 outside of the main thread, where Python handles no signals, or for a signal that cannot be
            handled.
    """
    if signals and threading.current_thread() is not threading.main_thread():
        raise RunError(
            "QN306",
            f"{_names(signals)} cannot be handled in thread {threading.current_thread().name}",
            fix="call it in the main thread, or without signals: preempt_signals=() of a Trainer",
        )
    note = _Note(handler)
    try:
        for number in dict.fromkeys(signals):
            try:
                handled = signal.getsignal(number)
                note.before[number] = signal.SIG_DFL if handled is None else handled
                signal.signal(number, note)
            except (OSError, ValueError) as error:
                note.before.pop(number, None)
                raise RunError("QN306", f"{_names([number])}: {error}", fix="handle SIGTERM or SIGUSR1") from None
        register_after_fork(note, _Note.hear_parent_alone)  # as long as the note lives
        _notes().append(note)
        yield
    finally:
        if note in _notes():
            _notes().remove(note)
        for number, former in note.before.items():
            signal.signal(number, former)
        note.before.clear()


class _Note:
    """Handles signals in the process that made it. ``before``: how each was handled then."""

    def __init__(self, handler: Handler) -> None:
        self.handler, self.process = handler, os.getpid()
        self.before = dict[int, Any]()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self.process:
            self.handler(number)
            return
        signal.signal(number, self.former(number))
        os.kill(os.getpid(), number)

    def former(self, number: int) -> Any:
        """Return how a signal is handled outside of all notes."""
        previous = self.before[number]
        return previous.former(number) if isinstance(previous, _Note) else previous

    def hear_parent_alone(self) -> None:
        """In the main thread of a child that multiprocessing has just forked. Signals are blocked there, since before
        the fork (see :func:`_notes`), and in every thread that it makes, but for one that looks at who sent them."""
        if not self.before or not _SENDERS:
            return
        for number in self.before:
            signal.signal(number, self.former(number))
        heard = os.getppid(), os.getpid()
        thread = threading.Thread(target=_hear, args=(tuple(self.before), heard), daemon=True, name="quintnet-signals")
        former = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # it gets no signal of another note
        thread.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, former | self.before.keys())


@call_once
def _notes() -> list[_Note]:
    """Those in force. From the first call on, a thread that forks blocks their signals meanwhile: one that comes to a
    child of multiprocessing before it knows whom to hear waits until it does."""
    found, here = list[_Note](), threading.local()

    def before() -> None:
        numbers = {number for note in found for number in note.before}
        here.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, here.mask)

    def in_child() -> None:
        if not _SENDERS or sys._getframe(1).f_globals.get("__name__") != "multiprocessing.popen_fork":
            after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=in_child)
    return found


def _hear(signals: Sequence[int], senders: Sequence[int]) -> None:
    """Let this thread, and so the process, get those of ``signals`` that come from ``senders``, and drop all others."""
    while True:
        came = signal.sigwaitinfo(signals)
        if came.si_pid in senders:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [came.si_signo])
            signal.raise_signal(came.si_signo)
            signal.pthread_sigmask(signal.SIG_BLOCK, [came.si_signo])


def _names(signals: Sequence[int]) -> str:
    names = {int(entry): entry.name for entry in signal.Signals}
    return ", ".join(names.get(int(number), str(number)) for number in signals)
