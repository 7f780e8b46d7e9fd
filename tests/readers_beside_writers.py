"""Save again and again in one process, and load in another: each load has one whole checkpoint."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet

ROOT = Path(__file__).parents[1]
STOP = "stop"  # a file whose appearance ends the writer
START_SECONDS = 600  # of a loaded machine


@dataclass(frozen=True)
class Counts:
    """What a reader saw. ``states``: how many different ones."""

    loads: int
    states: int
    mixed: tuple[str, ...]
    errors: tuple[str, ...]


@dataclass(frozen=True)
class Saving:
    """How a writer saves: ``rotates`` takes a new step each time and keeps ``keep``; else one step is replaced."""

    place: str
    rotates: bool
    keep: int

    def save(self, job: Job, value: int) -> None:
        """Fill every tensor with ``value`` and save it."""
        job.fill(value)
        step = value if self.rotates else 1
        job.program.save(self.place, step=step, keep=self.keep, optimizer=job.optimizer, extra={"value": value})


@dataclass(frozen=True)
class Job:
    """A program and its optimizer."""

    program: Any
    optimizer: torch.optim.Optimizer

    @classmethod
    def make(cls, ranks: int = 1) -> Job:
        """Compile a model whose parameters are split over ``ranks``."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        batch = torch.randn(4, 32), torch.randn(4, 32)
        program = quintnet.compile(model, quintnet.Mesh(tp=ranks), batch, loss_fn=F.mse_loss)
        optimizer = torch.optim.SGD(program.parameters(), lr=0.1, momentum=0.9)
        program.step(batch)
        optimizer.step()
        return cls(program, optimizer)

    def tensors(self) -> Iterator[Tensor]:
        """Yield parameters and momenta, each rank's part of them."""
        for parameter in self.program.parameters():
            for x in (parameter, self.optimizer.state[parameter]["momentum_buffer"]):
                yield x.to_local() if hasattr(x, "to_local") else x

    @torch.no_grad()
    def fill(self, value: int) -> None:
        """Set every element to ``value``."""
        for x in self.tensors():
            x.fill_(value)

    def values(self) -> set[float]:
        """Return the elements that there are."""
        return {float(value) for x in self.tensors() for value in x.detach().unique()}


def write(place: str, rotates: bool, keep: int, folder_of_stop: str) -> None:
    """Save until the file ``stop`` appears; every rank runs this."""
    saving, job = Saving(place, rotates, keep), Job.make(dist.get_world_size() if dist.is_initialized() else 1)
    value, ends = 0, torch.zeros(())
    while not ends:
        value += 1
        saving.save(job, value)
        ends = torch.tensor(float((Path(folder_of_stop) / STOP).exists()))
        if dist.is_initialized():
            dist.broadcast(ends, 0)


@contextlib.contextmanager
def writer_process(saving: Saving, files: int, control: Path) -> Iterator[None]:
    """Run a writer of ``files`` ranks in a process of its own.

    Raises:
        RuntimeError: if it fails.
    """
    arguments = [saving.place, str(int(saving.rotates)), str(saving.keep), str(control), str(files)]
    command = [sys.executable, "-m", "tests.readers_beside_writers", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield
    finally:
        (control / STOP).touch()
        output, _ = process.communicate(timeout=START_SECONDS)
        if process.returncode:
            raise RuntimeError(output[-3000:])


@contextlib.contextmanager
def writer_thread(saving: Saving, control: Path) -> Iterator[None]:
    """Run a writer of one rank in a thread: a store in memory is that of one process."""
    failures: list[BaseException] = []

    def work() -> None:
        try:
            write(saving.place, saving.rotates, saving.keep, str(control))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        (control / STOP).touch()
        thread.join(START_SECONDS)
    if failures:
        raise RuntimeError("the writer failed") from failures[0]


def read(place: str, seconds: float, is_there: Callable[[], bool]) -> Counts:
    """Load for so many seconds after the first checkpoint is there."""
    job = Job.make()
    until = time.monotonic() + START_SECONDS
    while not is_there():
        if time.monotonic() > until:
            raise RuntimeError("no checkpoint appeared")
        time.sleep(0.01)
    loads, states, mixed, errors = 0, set[float](), [], []
    until = time.monotonic() + seconds
    while time.monotonic() < until or len(states) < 3:
        loads += 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", quintnet.CheckpointWarning)
                restored = job.program.load(place, optimizer=job.optimizer)
        except (quintnet.QuintNetError, quintnet.CheckpointWarning) as error:
            errors.append(str(error))
            continue
        values = job.values() | {float(restored.extra["value"])}
        states |= values
        if len(values) > 1:
            mixed.append(f"{sorted(values)}")
        if time.monotonic() > until + START_SECONDS:
            raise RuntimeError("the writer stands still")
    return Counts(loads, len(states), tuple(mixed), tuple(errors))


def main() -> None:
    """Write, in as many ranks as there are to be files."""
    place, rotates, keep, control, files = sys.argv[1:]
    torch.set_num_threads(1)
    arguments = (place, bool(int(rotates)), int(keep), control)
    if files == "1":
        return write(*arguments)
    quintnet.launch(write, int(files), arguments)


if __name__ == "__main__":
    main()
