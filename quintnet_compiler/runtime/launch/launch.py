"""Run a function on several ranks, again if need be."""

from __future__ import annotations

import math
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...core.errors import CompileError, FaultWarning
from . import board
from .attempt import Attempt, Job
from .faults import Fault
from .heartbeat import current
from .inside_launcher import inside_launcher
from .launchers import started


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
) -> list[Any]:
    """Run ``fn(*args)`` on ``num_ranks`` ranks and return the results by rank.

    Starts processes on this machine that communicate over loopback (gloo, or NCCL if each has a GPU). In a process that
    torchrun, srun, mpirun or another launcher started as one of several, it uses that launcher's world instead: ``fn``
    runs once, in this process, and the list holds this rank's result at its index. Restarts are then the launcher's
    (torchrun ``--max-restarts``).

    Args:
        fn: a function at the top level of a module, so that other processes can import it.
        num_ranks: the number of processes.
        args: the arguments of ``fn``; they are pickled.
        timeout: seconds after which the run is ended; None: no limit.
        collective_timeout: seconds that ranks wait for each other in a collective.
        threads: torch threads per process.
        restarts: how often all ranks are started again after a fault. ``fn`` then runs from the beginning and must load
            its own checkpoint (:meth:`CompiledProgram.load`; a :class:`Trainer` with a checkpoint_folder does).
        fewest: the smallest number of ranks to restart with: a rank at fault in two consecutive attempts is left out.
            ``fn`` then finds a smaller world (``torch.distributed.get_world_size()``). None: ``num_ranks``.

    Raises:
        RunError: QN302 if a rank fails or dies, QN303 if one is stopped, QN402 if one does not reach a collective,
            QN304 after ``timeout``; with the rank that caused it. All others are ended. A QuintNetError that ``fn``
            raised is raised as it is, and is not retried.
    """
    least = num_ranks if fewest is None else fewest
    if not 1 <= least <= num_ranks or restarts < 0:
        raise CompileError(
            "QN108",
            f"launch of {num_ranks} ranks with fewest={fewest} and restarts={restarts}",
            fix=f"1 to {num_ranks} ranks, 0 or more restarts",
        )
    job = Job(fn, args, threads, collective_timeout)
    world = started()
    if world is not None and (world.elastic or current.get() is None):
        return inside_launcher(job, world, num_ranks, least)
    deadline = time.monotonic() + timeout if timeout is not None else math.inf
    folder = Path(tempfile.mkdtemp(prefix="quintnet-"))  # of stacks; it stays if they are needed
    slots, suspects = list(range(num_ranks)), set[int]()
    try:
        for number in range(restarts + 1):
            with Attempt(job, slots, folder / f"attempt{number}") as attempt:
                found = attempt.run(deadline)
            if not isinstance(found, Fault):
                return found
            if number == restarts or not found.again:
                raise found.error
            blamed = {slots[rank] for rank in found.ranks}
            gone = blamed & suspects if len(slots) - len(blamed & suspects) >= least else set()
            slots, suspects = [slot for slot in slots if slot not in gone], blamed - gone
            message = f"{found.error}\n  restart {number + 1} of {restarts}, with {len(slots)} ranks"
            warnings.warn(FaultWarning(message), stacklevel=2)
    finally:
        _tidy(folder)
    raise AssertionError("the last attempt returns or raises")


def _tidy(folder: Path) -> None:
    """Keep nothing but stacks."""
    for one in folder.glob(f"*/{board.NAME}"):
        one.unlink()
    for one in [*folder.iterdir(), folder]:
        if not any(one.iterdir()):
            one.rmdir()
