"""The heartbeat of a process group that launch did not make: of a script without it under torchrun, srun or mpirun, of
Ray's and Lightning's workers, or of the user's own processes."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import uuid
from contextlib import ExitStack

import torch.distributed as dist

from ...compat.distributed import PrefixStore, Store, store_of_world, timeout_of
from .heartbeat import GRACE, PERIOD, VERDICT, Heartbeat, beats, current
from .inside_launcher import LONGEST_SILENCE, Guard, Neighbours, folder_of
from .rank_status import first_line, of_communication
from .run_folder import run_folder


def watch_group() -> None:
    """Give this process, one of several ranks, a heartbeat if it has none, over the store in which the ranks met.

    Nobody is waited for: a rank that has no heartbeat yet is at its start. It ends with the process group, or with the
    process. Groups that met by a file, or in one process, have none.
    """
    group, group_store = dist.group.WORLD, store_of_world()
    if beats() or group is None or group_store is None:
        return
    rank, size, patience = dist.get_rank(), dist.get_world_size(), timeout_of(group)

    def connect() -> Store:
        return PrefixStore("quintnet", group_store.clone())

    store = connect()
    name = store.compare_set("attempt", "", f"quintnet/{uuid.uuid4().hex}").decode()
    store.compare_set(VERDICT, "", "")
    used = ExitStack()
    folder = used.enter_context(run_folder(folder_of(name)))
    silence = min(LONGEST_SILENCE, patience)
    pulse = Heartbeat(connect, rank, size, folder, patience, Neighbours(rank, size, silence, folder), group)
    pulse.start()
    current.set(pulse)
    Guard(pulse, silence, "the store of the process group").start()
    atexit.register(_leave, pulse, used, os.getpid())


def _leave(pulse: Heartbeat, used: ExitStack, process: int) -> None:
    """The process ends: say how."""
    if os.getpid() != process:  # a forked child
        return
    if not pulse.over.is_set():
        error = getattr(sys, "last_value", None)
        with contextlib.suppress(Exception):  # whoever keeps the store may have left before
            if error is None:
                pulse.finish()
            elif not of_communication(error):
                pulse.fail(f"rank {pulse.rank} raised {type(error).__name__}: {first_line(error)}")
            if pulse.rank == 0:  # it may keep the store
                _linger(pulse)
    pulse.stop()
    used.close()


def _linger(pulse: Heartbeat) -> None:
    """Let the others hear of this rank, if they wait for it."""
    until = time.monotonic() + GRACE / 2
    while time.monotonic() < until and not all(row.finished for row in pulse.rows().values()):
        time.sleep(PERIOD)
