"""Run a function on several ranks, again if need be."""

from __future__ import annotations

import itertools
import math
import multiprocessing as mp
import os
import sys
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ...core.errors import CompileError, FaultWarning, RunError, printable
from .attempt import Attempt, Job
from .faults import Fault
from .forwarding import Forwarding, forwarding
from .heartbeat import PERIOD, current
from .inside_launcher import inside_launcher
from .launchers import started
from .preemption import Preempted
from .run_folder import new_folder, run_folder
from .sending import LAUNCHES_AGAIN, launched_by_import, packed_call


def launch(
    fn: Callable[..., Any],
    num_ranks: int,
    args: Sequence[Any] = (),
    *,
    timeout: float | None = None,
    collective_timeout: float = 600.0,
    threads: int = 1,
    restarts: int = 0,
    fewest: int | None = None,
    available: Callable[[], Collection[int]] | None = None,
    grace: float = 300.0,
) -> list[Any]:
    """Run ``fn(*args)`` on ``num_ranks`` ranks and return the results by rank.

    Starts processes on this machine that communicate over loopback (gloo, or NCCL if each has a GPU). In a process that
    torchrun, srun, mpirun or another launcher started as one of several, it uses that launcher's world instead: ``fn``
    runs once, in this process, and the list holds this rank's result at its index. Restarts are then the launcher's
    (torchrun ``--max-restarts``).

    Args:
        fn: any function: what other processes cannot import (a lambda, a closure, a function of a notebook) is sent to
            them by value, with the variables that it uses. A script needs ``if __name__ == "__main__":`` around the
            call of launch, as its ranks import the script.
        num_ranks: the number of processes.
        args: the arguments of ``fn``. Each rank gets copies of its own, and so does the caller of results.
        timeout: seconds after which the run is ended, from the call on; None: no limit.
        collective_timeout: seconds that ranks wait for each other in a collective.
        threads: torch threads per process.
        restarts: how often all ranks are started again after a fault. ``fn`` then runs from the beginning and must load
            its own checkpoint (:meth:`CompiledProgram.load`; a :class:`Trainer` with a checkpoint_folder does).
        fewest: the smallest number of ranks to restart with: a rank at fault in two consecutive attempts is left out.
            ``fn`` then finds a smaller world (``torch.distributed.get_world_size()``). None: ``num_ranks``.
        available: says which of the places 0 to ``num_ranks`` - 1 ranks can have now (a place has a GPU of its own if
            the machine has enough); None: all. It is called before each start and once a second, and must return at
            once. If ranks run on other places than these, they are asked to save and to end, as after a signal (see
            ``grace``), and ``fn`` starts again with a rank on each of these: more ranks, fewer, or others. This is no
            restart. If it raises, places are as before, with a :class:`quintnet.FaultWarning`; the first time, that is
            the error of launch. While there are less than ``fewest``, nothing runs. A place that was left out may be
            used again after it was not available for a while.
        grace: SIGTERM and SIGUSR1 that this process gets, and does not handle by itself, are passed on to all ranks;
            seconds that these have then to save and to end (see :meth:`CompiledProgram.on_preempt`). They are not
            started again.

    Raises:
        Preempted: if ranks have saved and ended because they were asked to.
        RunError: QN302 if a rank fails or dies, QN303 if one is stopped, QN402 if one does not reach a collective,
            QN304 after ``timeout``, or ``grace`` after a signal; with the rank that caused it. All others are ended. A
            QuintNetError that ``fn`` raised is raised as it is, and is not retried. QN307 if ``fn`` or an
            argument cannot be sent to other processes, if the script launches its ranks again when they import it, or
            if this machine or process cannot start ranks.
    """
    least = num_ranks if fewest is None else fewest
    if not 1 <= least <= num_ranks or restarts < 0:
        raise CompileError(
            "QN108",
            f"launch of {num_ranks} ranks with fewest={fewest} and restarts={restarts}",
            fix=f"1 to {num_ranks} ranks, 0 or more restarts",
        )
    if launched_by_import(sys._getframe()):
        os._exit(LAUNCHES_AGAIN)
    job = Job(partial(fn, *args), threads, collective_timeout)
    world, pulse = started(), current.get()
    if world is not None and (world.elastic or pulse is None or pulse.group is not None):
        return inside_launcher(job, world, num_ranks, least)
    if mp.current_process().daemon:
        raise RunError(
            "QN307",
            f"launch was called in {mp.current_process().name}, a daemonic process, which may have no children",
            fix="call it in another process: multiprocessing.Process(..., daemon=False), or one of "
            "concurrent.futures.ProcessPoolExecutor",
        )
    job = replace(job, call=packed_call(fn, args))
    places = Places(num_ranks, least, available)
    with forwarding(grace) as signals:
        outcome = _attempts(job, places, restarts, timeout, signals)
    if not isinstance(outcome, Fault):
        if any(isinstance(result, Preempted) for result in outcome):
            raise Preempted
        return outcome
    if outcome.again:  # ranks that do not handle the signal have ended by it
        signals.end_as_asked()
    raise outcome.error


@dataclass
class Places:
    """The places of ranks on this machine.

    ``suspects``: places of ranks at fault in the last attempt; ``left_out``: in two consecutive ones, until they were
    not available for a while.
    """

    number: int
    fewest: int
    ask: Callable[[], Collection[int]] | None = None
    answer: set[int] | None = None  # the last one
    told: str = ""  # why there was none, the last time
    suspects: set[int] = field(default_factory=set)
    left_out: set[int] = field(default_factory=set)

    def available(self) -> list[int]:
        """Return the places that are available.

        Raises:
            CompileError: QN108 for a place that does not exist.
        """
        every = range(self.number)
        places = set(every) if self.ask is None else self._asked(self.ask)
        if not places <= {*every}:
            fix = f"return some of the places 0 to {self.number - 1}"
            raise CompileError("QN108", f"available returned {sorted(places, key=str)}", fix=fix)
        self.left_out &= places
        return sorted(places - self.left_out)

    def _asked(self, ask: Callable[[], Collection[int]]) -> set[int]:
        try:
            self.answer, self.told = set(ask()), ""
        except Exception as error:
            if self.answer is None:  # nothing runs yet
                raise
            text = printable(f"available raised {type(error).__name__}: {error}; places are taken as before")
            if text != self.told:
                warnings.warn(FaultWarning(text), stacklevel=2)
            self.told = text
        return set(self.answer)

    def blame(self, at_fault: set[int]) -> None:
        """Ranks on these places were at fault."""
        twice = at_fault & self.suspects
        if len(set(self.available()) - twice) < self.fewest:
            twice = set()
        self.left_out |= twice
        self.suspects = at_fault - twice

    def wait(self, deadline: float, signals: Forwarding) -> list[int]:
        """Wait for as many places as are needed, and return those that are available.

        Raises:
            Preempted: if a signal came.
            RunError: QN304 if there are not enough in time.
        """
        reported = False
        while len(places := self.available()) < self.fewest:
            if not reported:
                reported = True
                text = f"places {places} are available, and at least {self.fewest} are needed: waiting"
                print(text, file=sys.stderr, flush=True)
            signals.pass_on([])
            if signals.first is not None:
                raise Preempted  # ranks that ran before have saved what they did
            if time.monotonic() > deadline:
                raise RunError("QN304", f"places {places} are available, and at least {self.fewest} are needed")
            time.sleep(PERIOD)
        return places


def _attempts(job: Job, places: Places, restarts: int, timeout: float | None, signals: Forwarding) -> list[Any] | Fault:
    """Return the outcome of the last attempt."""
    deadline, restarted = time.monotonic() + timeout if timeout is not None else math.inf, 0
    with run_folder(new_folder()) as folder:
        for number in itertools.count():
            slots = places.wait(deadline, signals)
            with Attempt(job, slots, folder / f"attempt{number}", signals, places.available) as attempt:
                outcome = attempt.wait_for_results(deadline)
            if signals.first is not None:
                return outcome
            if attempt.moves(outcome):
                continue
            if not isinstance(outcome, Fault) or restarted == restarts or not outcome.again:
                return outcome
            restarted += 1
            places.blame({slots[rank] for rank in outcome.ranks})
            saved = outcome.saved or "no rank saved anything"
            again = f"restart {restarted} of {restarts}, with {len(places.available())} ranks; {saved} after the fault"
            message = f"{outcome.error}\n  {again}"
            warnings.warn(FaultWarning(message), stacklevel=3)
    raise AssertionError("the last attempt returns")
