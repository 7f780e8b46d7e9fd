"""Programs that start processes, and what they tell each of them in its environment."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...core.errors import RunError
from .accelerator import take_accelerator

MEETING = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launcher:
    """The names of the variables with the number of processes, of this one, and of this one on its node."""

    name: str
    size: str
    rank: str
    local_rank: str


LAUNCHERS = (
    Launcher("torchrun (or another launcher that sets WORLD_SIZE)", "WORLD_SIZE", "RANK", "LOCAL_RANK"),
    # of a step, and not of the job: the script that sbatch starts is one process
    Launcher("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"),
    Launcher("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    Launcher("mpiexec", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
)


@dataclass(frozen=True)
class Started:
    """What one of the launchers says of this process, one of ``size`` (more than 1)."""

    launcher: Launcher
    size: int
    environment: Mapping[str, str]

    def join(self) -> None:
        """Make the process group of all that were started; on accelerators where the machine has some, else gloo.

        Raises:
            RunError: QN301 if the environment does not say where they meet, or if there are more than accelerators.
        """
        launcher, known = self.launcher, self.environment
        missing = [name for name in (launcher.rank, *MEETING) if name not in known]
        if missing:
            raise RunError(
                "QN301",
                f"{launcher.name} started {self.size} processes ({launcher.size}={self.size}), and this one has no "
                f"process group and no {', '.join(missing)} to make one with",
                fix=f"set {' and '.join(missing)} for every process, or start them with torchrun",
            )
        dist.init_process_group(
            **take_accelerator(self._place()),
            init_method=f"tcp://{known['MASTER_ADDR']}:{known['MASTER_PORT']}"
            if launcher.size != "WORLD_SIZE"
            else None,
            rank=int(known[launcher.rank]),
            world_size=self.size,
        )
        atexit.register(_leave)

    def _place(self) -> int:
        """The number of this process on its machine. A launcher that does not say it fills machines in order."""
        if self.launcher.local_rank in self.environment:
            return int(self.environment[self.launcher.local_rank])
        return int(self.environment[self.launcher.rank]) % max(1, torch.accelerator.device_count())


def started() -> Started | None:
    """Who started this process as one of several; None if nobody did."""
    known = os.environ
    for launcher in LAUNCHERS:
        size = known.get(launcher.size, "")
        if size.isdigit() and int(size) > 1:
            return Started(launcher, int(size), known)
    return None


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
