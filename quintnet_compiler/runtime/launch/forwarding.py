"""Signals that the launching process gets, and passes on to its ranks: they may save before they end."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from .preemption import SIGNALS, handling
from .run_folder import remove_fork_server_folder


@dataclass
class Forwarding:
    """``grace``: seconds that ranks have after the first signal. ``came``: signals that were not passed on yet."""

    grace: float
    came: list[int] = field(default_factory=list)
    first: int | None = None
    until: float | None = None

    def pass_on(self, processes: Sequence[int]) -> None:
        """Send the signals that came to these processes."""
        while self.came:
            number = self.came.pop(0)
            for process in processes:
                with contextlib.suppress(ProcessLookupError):  # it has ended, and nobody has noticed yet
                    os.kill(process, number)
            if self.first is None:
                self.first, self.until = number, time.monotonic() + self.grace
                name, ranks = signal.Signals(number).name, f"{len(processes)} rank{'s' * (len(processes) != 1)}"
                message = f"{name} is passed on to {ranks}: {self.grace:g} s to save and end"
                print(message, file=sys.stderr, flush=True)

    @property
    def late(self) -> bool:
        """Return whether ranks have had all the time that they get."""
        return self.until is not None and time.monotonic() > self.until

    def end_as_asked(self) -> None:
        """End this process by the signal that it got, as it would have without passing it on."""
        if self.first is not None:
            remove_fork_server_folder()
            os.kill(os.getpid(), self.first)


@contextlib.contextmanager
def forwarding(grace: float) -> Iterator[Forwarding]:
    """Note SIGTERM and SIGUSR1 inside, to be passed on.

    Signals that this process handles or ignores by itself stay as they are, and outside of the main thread, where
    Python handles none, all do.
    """
    signals = Forwarding(grace)
    in_main_thread = threading.current_thread() is threading.main_thread()
    free = [number for number in SIGNALS if in_main_thread and signal.getsignal(number) is signal.SIG_DFL]
    with handling(free, signals.came.append):
        yield signals
