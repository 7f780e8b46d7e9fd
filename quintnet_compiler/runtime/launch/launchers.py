"""Programs that start processes, and what they tell each of them in its environment."""

from __future__ import annotations

import atexit
import os
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ...compat.distributed import PrefixStore, TCPStore
from ...core.errors import RunError
from .accelerator import take_accelerator

MEETING = ("MASTER_ADDR", "MASTER_PORT")
Environment = Mapping[str, str]
_FIRST_PORT, _PORTS = 15000, 15000  # below those that the kernel gives to clients


@dataclass(frozen=True)
class Meeting:
    """The place where the processes of a job meet: rank 0 listens there. ``job``: a name that no other job has."""

    host: str
    port: int
    job: str


def _nowhere(environment: Environment) -> Meeting | None:
    return None


@dataclass(frozen=True)
class Launcher:
    """The names of the variables with the number of processes, of this one, of this one on its node, and of those on
    its node; and where the processes meet if MASTER_ADDR and MASTER_PORT are not set."""

    name: str
    size: str
    rank: str
    local_rank: str
    local_size: str = ""
    meeting: Callable[[Environment], Meeting | None] = _nowhere


def first_host(hosts: str) -> str:
    """The first name of a SLURM list: ``node07`` of ``node[07-09,12],other``."""
    first = re.match(r"([^\[,]*)(?:\[(\d+)[^\]]*\])?([^\[,]*)", hosts)
    return "".join(part or "" for part in first.groups()) if first else ""


def _of_slurm(environment: Environment) -> Meeting | None:
    """Return the first node of the step, and a port by the numbers of job and step."""
    hosts, job, step = (environment.get(f"SLURM_{name}", "") for name in ("STEP_NODELIST", "JOB_ID", "STEP_ID"))
    return Meeting(first_host(hosts), _port(f"{job}.{step}"), f"{job}.{step}") if hosts and job else None


def _of_open_mpi(environment: Environment) -> Meeting | None:
    """Return this node, if it is the only one, and a port by the name of the job."""
    job, size = environment.get("PMIX_NAMESPACE"), environment["OMPI_COMM_WORLD_SIZE"]
    one_node = environment.get("OMPI_COMM_WORLD_LOCAL_SIZE") == size
    return Meeting("127.0.0.1", _port(job), job) if job and one_node else None


def _port(job: str) -> int:
    return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS


# The first that says that there are several processes. mpirun starts its helpers with srun: what is closest to the
# process comes first.
LAUNCHERS = (
    Launcher(
        "torchrun (or another launcher that sets WORLD_SIZE)", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    ),
    Launcher(
        "mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE", _of_open_mpi,
    ),
    Launcher("mpiexec", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # of a step, and not of the job: the script that sbatch starts is one process
    Launcher("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", meeting=_of_slurm),
)  # fmt: skip


@dataclass(frozen=True)
class Started:
    """A launcher's description of this process, one of ``size``."""

    launcher: Launcher
    size: int
    environment: Environment

    @property
    def elastic(self) -> bool:
        """Return whether torchrun started it, which keeps a store and starts processes again."""
        return "TORCHELASTIC_RUN_ID" in self.environment

    @property
    def local_rank(self) -> int:
        """The number of this process on its machine. A launcher that does not say it fills machines in order."""
        if self.launcher.local_rank in self.environment:
            return int(self.environment[self.launcher.local_rank])
        return int(self.environment[self.launcher.rank]) % max(1, torch.accelerator.device_count())

    @property
    def on_this_machine(self) -> int | None:
        """Return how many were started on this machine, if that is known."""
        count = self.environment.get(self.launcher.local_size, "")
        return int(count) if count.isdigit() else None

    def meeting(self) -> Meeting | None:
        """Return where the processes meet, as far as the environment says it."""
        environment = self.environment
        if all(name in environment for name in MEETING):
            return Meeting(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), "")
        return self.launcher.meeting(environment)

    def meeting_store(self, patience: timedelta | None = None) -> tuple[Any, str, int]:
        """Return a store where all processes of this job meet, a prefix of their names there, and this one's rank.

        torchrun's store is named by its count of restarts: each attempt has other names.

        Raises:
            RunError: QN301 if the environment does not say where they meet.
        """
        environment, launcher, where = self.environment, self.launcher, self.meeting()
        missing = [name for name in (launcher.rank, *(MEETING if where is None else ())) if name not in environment]
        if missing or where is None:
            raise RunError(
                "QN301",
                f"{launcher.name} started {self.size} processes ({launcher.size}={self.size}), and this one has no "
                f"process group and no {', '.join(missing)} to make one with",
                fix=f"set {' and '.join(missing)} for every process, or start them with torchrun",
            )
        rank, limit = int(environment[launcher.rank]), patience or timedelta(minutes=5)
        if self.elastic:
            store, rank, _ = next(rendezvous("env://", timeout=limit))
            return store, "", rank
        return TCPStore(where.host, where.port, self.size, rank == 0, timeout=limit), f"quintnet {where.job}", rank

    def join(self) -> None:
        """Make the process group of all that were started; on accelerators where the machine has some, else gloo.

        Raises:
            RunError: QN301 if the environment does not say where they meet, or if there are more than accelerators.
        """
        store, prefix, rank = self.meeting_store()
        named = PrefixStore(prefix, store) if prefix else store
        dist.init_process_group(**take_accelerator(self.local_rank), store=named, rank=rank, world_size=self.size)
        atexit.register(_leave)


def started() -> Started | None:
    """Return the launcher that started this process as one of several, or of an elastic job (torchrun); else None."""
    environment = os.environ
    for launcher in LAUNCHERS:
        size = environment.get(launcher.size, "")
        if size.isdigit() and (int(size) > 1 or "TORCHELASTIC_RUN_ID" in environment):
            return Started(launcher, int(size), environment)
    return None


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
