"""A rank that a launcher started: it meets the others of its attempt, and watches its neighbours."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...compat.distributed import PrefixStore, Store
from ...core.errors import QuintNetError, RunError
from ..threads.at_exit import finish_all, finish_or_warn
from .accelerator import take_accelerator
from .attempt import Job
from .board import last_step
from .disagreement import disagreement
from .faults import gone, number_space, stopped
from .heartbeat import PERIOD, VERDICT, Heartbeat, dump_stacks
from .launchers import Started
from .preemption import Preempted
from .rank_status import RankStatus, of_communication, read_rows
from .run_folder import new_folder, run_folder

LONGEST_SILENCE = 60.0  # seconds that a rank may say nothing: the network repairs itself within some
STOPPED = 1.0  # seconds after which a rank that may not run is given up


def inside_launcher(job: Job, world: Started, num_ranks: int, fewest: int) -> list[Any]:
    """Run the job's function here, as one rank of the launcher's world.

    Raises:
        RunError: QN301 if the world has more ranks than ``num_ranks``, or fewer than ``fewest``, or cannot meet.
    """
    size = world.size
    if not fewest <= size <= num_ranks:
        raise RunError(
            "QN301",
            f"launch was asked for {num_ranks} ranks, and {world.launcher.name} started {size} "
            f"({world.launcher.size}={size})",
            fix=f"start {num_ranks} processes (torchrun --nproc-per-node {num_ranks}, srun --ntasks {num_ranks}, "
            f"mpirun -np {num_ranks})",
        )
    results: list[Any] = [None] * size
    if dist.is_initialized():
        with finished_saves(job.patience):
            results[dist.get_rank()] = job.call()
        return results
    patience = timedelta(seconds=job.patience)
    launcher_store, prefix, rank = world.meeting_store(patience)
    while isinstance(launcher_store, PrefixStore):  # torchrun's, by a count of restarts on which nodes may not agree
        launcher_store = launcher_store.underlying_store
    shared = PrefixStore(prefix, launcher_store)
    name = agree_on_attempt(shared, rank, size, job.patience)
    silence = min(LONGEST_SILENCE, job.patience)
    preempted: Preempted | None = None

    def connect() -> Store:
        return PrefixStore(f"{name}/rows", PrefixStore(prefix, launcher_store.clone()))

    with (
        run_folder(folder_of(name)) as folder,
        torch_threads(job.threads),
        Heartbeat(connect, rank, size, folder, job.patience, Neighbours(rank, size, silence, folder)) as pulse,
    ):
        meeting = world.meeting()
        Guard(pulse, silence, f"{meeting.host}:{meeting.port}" if meeting else "the store").start()
        store = PrefixStore(f"{name}/group", shared)
        accelerator = take_accelerator(world.local_rank)
        dist.init_process_group(**accelerator, store=store, rank=rank, world_size=size, timeout=patience)
        try:
            with finished_saves(job.patience):
                results[rank] = job.call()
        except Preempted as request:  # all ranks leave together
            preempted = request
        except RuntimeError as error:  # outside of a program's run: in a save, or in communication of the user's own
            if isinstance(error, QuintNetError) or not of_communication(error):
                raise
            raise pulse.cause(error) from error
        pulse.finish()
        finish_attempt(store, rank, size)
        dist.destroy_process_group()
    if preempted is not None:
        raise preempted
    return results


@contextlib.contextmanager
def finished_saves(patience: float) -> Iterator[None]:
    """Leave only when what was begun in the background inside is done, also by an exception.

    Raises:
        QuintNetError: if that failed, and nothing else did.
    """
    try:
        yield
    except Preempted:
        finish_all(patience)
        raise
    except BaseException:
        finish_or_warn(patience)
        raise
    finish_all(patience)


def folder_of(name: str) -> Path:
    """A folder that the ranks of this machine share in the attempt ``name``, which nobody else can guess."""
    folder = Path(tempfile.gettempdir()) / name.replace("/", "-")
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid == os.getuid():
            return folder
    return new_folder()


@contextlib.contextmanager
def torch_threads(number: int) -> Iterator[None]:
    """Compute with this many threads of torch inside: the process is the user's."""
    previous = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(previous)


def agree_on_attempt(store: Store, rank: int, size: int, patience: float) -> str:
    """Return a name for this attempt, on which all its ranks agree; the names of earlier attempts are not read.

    The first rank proposes one, and confirms it to those that it has met, each by a number of its own. (A count of
    restarts would not do: each node counts its own.)

    Raises:
        RunError: QN402 if not all ranks come.
    """
    own_number, until = uuid.uuid4().hex, time.monotonic() + patience
    if rank == 0:
        store.set("quintnet/attempt", own_number)
        keys = [f"quintnet/{own_number}/{other}" for other in range(1, size)]
        while not all(store.check([key]) for key in keys):
            _wait(until, [key.rpartition("/")[2] for key in keys if not store.check([key])])
        met = [store.get(key).decode() for key in keys]
        rows = PrefixStore(f"quintnet/{own_number}/rows", store)
        rows.set(VERDICT, "")
        store.set(f"quintnet/{own_number}/met", json.dumps(met))
        return f"quintnet/{own_number}"
    answered = ""
    while True:
        if store.check(["quintnet/attempt"]):
            name = f"quintnet/{store.get('quintnet/attempt').decode()}"
            if name != answered:
                store.set(f"{name}/{rank}", own_number)
                answered = name
            if store.check([f"{name}/met"]) and own_number in json.loads(store.get(f"{name}/met")):
                return name
        _wait(until, ["0"])


def finish_attempt(store: Store, rank: int, size: int) -> None:
    """Wait until all ranks have come here. The first one may hold the store of all, and a rank that went would be taken
    for a silent one; until then heartbeats go on."""
    store.set(f"finished/{rank}", "")
    left = [f"finished/{other}" for other in range(size)]
    while left:
        left = [key for key in left if not store.check([key])]
        time.sleep(PERIOD if left else 0)


def _wait(until: float, missing: list[str]) -> None:
    if time.monotonic() > until:
        raise RunError("QN402", f"ranks did not come: {', '.join(missing)}")
    time.sleep(0.02)


@dataclass
class Neighbours:
    """The ranks before and after this one: everybody is watched by two, whatever the size of the world. Silence is
    counted in looks, so that time in which this rank could not look itself does not count."""

    rank: int
    size: int
    silence: float
    folder: Path  # that of the board of this machine's ranks
    looks: dict[int, tuple[int, int]] = field(default_factory=dict)  # of each: its beat, and looks since it changed
    held: dict[int, int] = field(default_factory=dict)  # looks since it was first seen stopped, or gone

    def look(self, store: Store) -> RunError | None:
        near = sorted({(self.rank + way) % self.size for way in (-1, 0, 1)})
        rows = read_rows(store, near)
        if (apart := disagreement(rows)) is not None:
            return apart.error
        errors = [self._judge(rank, row) for rank, row in rows.items() if rank != self.rank and not row.finished]
        return next((error for error in errors if error is not None), None)

    def _judge(self, rank: int, row: RankStatus) -> RunError | None:
        beat, looks = self.looks.get(rank, (-1, 0))
        looks = looks + 1 if row.beat == beat else 0
        self.looks[rank] = row.beat, looks
        on_this_machine = row.pid > 0 and row.space != "" and row.space == number_space()
        last = last_step(self.folder, rank) if on_this_machine else row.step
        step = f"in step {last}" if last >= 0 else "before its first step"
        where = f"rank {rank} {{}} {step} (pid {row.pid} on {row.host})"
        ended, held = on_this_machine and gone(row.pid), on_this_machine and stopped(row.pid)
        self.held[rank] = self.held.get(rank, 0) + 1 if ended or held else 0
        if self.held[rank] * PERIOD > STOPPED:
            if ended:
                return RunError("QN302", where.format("has ended"))
            with contextlib.suppress(OSError):
                os.kill(row.pid, signal.SIGCONT)  # so that it can hear, and leave: torchrun waits for it
            return RunError("QN303", where.format("was stopped (SIGSTOP)"))
        if row.beat > 0 and looks * PERIOD > self.silence:
            return RunError("QN303", where.format(f"has said nothing for {self.silence:g} s"))
        return None


class Guard(threading.Thread):
    """Ends this rank when the store does not answer any more: its node, or the way to it, is lost. A process of the
    user's own is ended only where it waits for others."""

    def __init__(self, pulse: Heartbeat, silence: float, where: str) -> None:
        super().__init__(daemon=True, name="quintnet-guard")
        self.pulse, self.silence, self.where = pulse, silence, where

    def run(self) -> None:
        seen, quiet = 0.0, 0
        while not self.pulse.over.wait(PERIOD):
            seen, quiet = self.pulse.last, quiet + 1 if self.pulse.last == seen else 0
            if quiet * PERIOD > self.silence and self.pulse.may_end:
                dump_stacks(self.pulse.folder, self.pulse.rank)
                error = RunError(
                    "QN303",
                    f"rank {self.pulse.rank} in step {self.pulse.now[1]}: {self.where} has not answered for "
                    f"{self.silence:g} s\n  stacks: {self.pulse.folder}",
                    fix="see whether its node is up, and the network between",
                )
                print(error, file=sys.stderr, flush=True)
                os._exit(1)
