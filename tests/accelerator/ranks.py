"""Programs on several emulated accelerators, one process each, beside the unsplit module."""

from __future__ import annotations

import datetime
import gc
import multiprocessing
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import quintnet
from quintnet_compiler.api import compiled_program
from quintnet_compiler.compat.torch import pytree
from quintnet_compiler.runtime.backends import backends
from quintnet_compiler.runtime.launch.attempt import PRELOADED
from quintnet_compiler.runtime.transport.distributed import DistributedTransport, device_mesh

from ..models import EVERY, build, reference, worst_error
from . import process_group
from .device import NAME, Counted, install
from .faults import FAULTS
from .process_group import register


@dataclass(frozen=True)
class Job:
    """A model of the tests on a layout."""

    model: str
    axes: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64

    def __str__(self) -> str:
        layout = "x".join(f"{axis}{size}" for axis, size in self.axes.items())
        return f"{self.model}-{layout}" + "".join(f"-{name}={value}" for name, value in self.options.items())


@dataclass(frozen=True)
class World:
    """How emulated accelerators behave. ``eager``: one communicator for each group, as with ``device_id=``; otherwise
    they are made at first use. ``seed``: of the delays of kernels and transfers; 0 for none."""

    size: int
    eager: bool = False
    seed: int = 0
    timeout: float = 60.0  # seconds, of hosts that wait for each other


def run(work: Callable[..., Any], world: World, *args: Any, limit: float = 300.0) -> list[Any]:
    """What ``work(*args)`` gives on each rank of ``world``.

    Raises:
        RuntimeError: what a rank raised, or that one was not done after ``limit`` seconds.
    """
    install()  # built once, before the ranks need it
    multiprocessing.get_context("forkserver").set_forkserver_preload(list(PRELOADED))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.start_processes(
            _rank, (world, port, folder, work, args), nprocs=world.size, join=False, start_method="forkserver"
        )
        end, found = time.monotonic() + limit, {}
        try:
            while len(found) < world.size:
                gone = not any(process.is_alive() for process in ranks.processes)
                for path in Path(folder).glob("*.done"):
                    found.setdefault(int(path.stem), pickle.loads(path.read_bytes()))
                for rank, (ok, value) in found.items():
                    if not ok:
                        raise RuntimeError(f"rank {rank}: {value}")
                if len(found) < world.size and (gone or time.monotonic() > end):
                    why = "ended" if gone else f"was not done after {limit:.0f} s"
                    raise RuntimeError(f"a rank {why}: done are {sorted(found)} of {world.size}")
                time.sleep(0.05)
        finally:
            for process in ranks.processes:
                process.kill()
                process.join()
    return [found[rank][1] for rank in range(world.size)]


def _rank(rank: int, world: World, port: int, folder: str, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    register()
    device = install()
    device.set_device(rank)
    device.delay(world.seed, share=0.1 if world.seed else 0.0)
    options = {"device_id": torch.device(NAME, rank)} if world.eager else {}
    dist.init_process_group(
        NAME,
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world.size,
        timeout=datetime.timedelta(seconds=world.timeout),
        **options,
    )
    try:
        found = True, work(*args)
    except BaseException:
        found = False, traceback.format_exc()
    path = Path(folder) / f"{rank}.made"
    path.write_bytes(pickle.dumps(found))
    path.rename(path.with_suffix(".done"))
    os._exit(0)  # its streams' threads have no orderly end


def train(job: Job, seeds: Sequence[int] = ()) -> str:
    """Three steps of AdamW, the last of another batch size, beside the unsplit module on the CPU.

    ``seeds``: the same again from the first parameters, with the delays of each seed. Compiled once.
    Returns "" if everything is equal, or what is not.
    """
    case = EVERY[job.model]
    batches = [case.batch(8), case.batch(8), case.batch(16)]
    options = {"loss_fn": case.loss_fn, **job.options}  # on the accelerator of the process group
    program = quintnet.compile(build(job.model, job.dtype), quintnet.Mesh(**job.axes), batches[0], **options)
    first = {name: p.detach().clone() for name, p in program.named_parameters()}
    expected = _unsplit(job, batches)
    wrong = _differences(job, program, batches, expected)
    for seed in seeds:
        install().delay(seed, share=0.1)
        with torch.no_grad():
            for name, p in program.named_parameters():
                p.copy_(first[name])
        wrong += [f"seed {seed}: {text}" for text in _differences(job, program, batches, expected)]
    return "; ".join(wrong)


def _unsplit(job: Job, batches: Sequence[Any]) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """Loss and gradients of each step of the unsplit module."""
    whole, found = build(job.model, job.dtype), []
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    for rows in batches:
        found.append(reference(whole, rows, EVERY[job.model].loss_fn))
        optimizer.step()
        optimizer.zero_grad()
    return found


def _differences(
    job: Job,
    program: quintnet.CompiledProgram,
    batches: Sequence[Any],
    expected: Sequence[tuple[Tensor, dict[str, Tensor]]],
) -> list[str]:
    """What is not as ``expected`` in steps from the program's parameters."""
    case, wrong = EVERY[job.model], []
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)
    for rows, (wanted, gradients) in zip(batches, expected, strict=True):
        loss = program.step(rows)
        found = {n: p.grad.full_tensor().cpu() for n, p in program.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]
        worst, name = worst_error(found, {n: gradients[n] for n in found})
        if abs(float(loss) - float(wanted)) > case.tolerance * max(1.0, abs(float(wanted))):
            wrong.append(f"loss {float(loss)}, not {float(wanted)}")
        if worst > case.tolerance * 100:
            wrong.append(f"gradient of {name}: {worst:.1e}")
        optimizer.step()
        optimizer.zero_grad()
    return wrong


def train_all(jobs: Sequence[Job], seeds: Sequence[int] = ()) -> dict[str, str]:
    """Of each job what :func:`train` says."""
    return {str(job): train(job, seeds) for job in jobs}


def count(job: Job) -> Counted:
    """What a training step asks of the device, with a batch that is there. The seventh: until then ranks compare what
    they have in most steps (:func:`quintnet_compiler.runtime.state.same_values.compares_batch`)."""
    case, here = EVERY[job.model], torch.device(NAME, dist.get_rank())
    batch = pytree.tree_map(lambda x: x.to(here, job.dtype if x.is_floating_point() else x.dtype), case.batch(8))
    options = {"loss_fn": case.loss_fn, "device": here, **job.options}
    program = quintnet.compile(build(job.model, job.dtype), quintnet.Mesh(**job.axes), batch, **options)
    for _ in range(6):
        program.step(batch)
        program.zero_grad()
    with install().counting() as found:
        program.step(batch)
    return found


def count_all(jobs: Sequence[Job]) -> dict[str, Counted]:
    """Of each job what :func:`count` says."""
    return {str(job): count(job) for job in jobs}


@dataclass(frozen=True)
class Measured:
    """The most bytes of parameters, gradients and values that the seventh step has at once, on a rank's device, and of
    all that is on its host, as ``measured`` and as ``simulated``; and what the step ``made``. (The seventh: as in
    :func:`count`.)"""

    measured: tuple[int, int]
    simulated: tuple[int, int]
    made: dict[str, Tensor]


def measure(job: Job) -> Measured:
    """A step of a job on this rank."""
    case, here = EVERY[job.model], torch.device(NAME, dist.get_rank())
    batch = pytree.tree_map(lambda x: x.to(here, job.dtype if x.is_floating_point() else x.dtype), case.batch(8))
    options = {"loss_fn": case.loss_fn, "device": here, **job.options}
    gc.collect()
    device, _, host, _ = install().extension.requested(here.index)
    program = quintnet.compile(build(job.model, job.dtype), quintnet.Mesh(**job.axes), batch, **options)
    for _ in range(7):
        program.zero_grad()
        loss = None  # what a step gave is no part of the next one
        between = install().extension.requested(here.index)[0] - device
        with install().measuring(here.index) as found:
            loss = program.step(batch)
    assert loss is not None
    staying = install().extension.requested(here.index)[2] - host
    made = {n: p.grad.to_local().cpu() for n, p in program.named_parameters() if p.grad is not None}  # type: ignore[attr-defined]
    rows = {tuple(row.coordinate.items()): row for row in program.simulate().rows}
    row = next(rows[key] for key in rows if dict(key).get("pp", 0) == dist.get_rank() % program.mesh["pp"])
    measured = between + found.device, found.host + staying
    return Measured(measured, (row.peak.bytes, row.host_bytes), {"loss": loss.cpu(), **made})


def measure_all(jobs: Sequence[Job]) -> dict[str, Measured]:
    """Of each job what :func:`measure` says."""
    return {str(job): measure(job) for job in jobs}


def train_alone(job: Job) -> tuple[str, str]:
    """What :func:`train` says of a job of one rank, and the class of what ran its program."""
    made: list[str] = []
    plain = backends.open_backend

    def opened(*args: Any, **options: Any) -> Any:
        found = plain(*args, **options)
        made.append(type(found).__name__)
        return found

    with mock.patch.object(compiled_program, "open_backend", opened):
        wrong = train(job)
    return wrong, ", ".join(made)


def fail(how: str, job: Job, limit: float) -> str:
    """In the third step something happens to rank 1; what rank 0 says of it. ``limit``: seconds of a collective."""
    case = EVERY[job.model]
    options = {"loss_fn": case.loss_fn, **job.options}
    program = quintnet.compile(build(job.model, job.dtype), quintnet.Mesh(**job.axes), case.batch(8), **options)
    for step in range(3):
        if step == 2 and dist.get_rank() == 1:
            if how == "late":
                time.sleep(3 * limit)
            if how in ("late", "gone"):
                return ""
            process_group.Exchange.carry_out = broken  # type: ignore[method-assign]
        try:
            program.step(case.batch(8))
        except quintnet.QuintNetError as error:
            return str(error)
    return "nothing failed"


def broken(*_: Any) -> None:
    """A collective that fails on its stream, after the host has gone on."""
    raise RuntimeError(
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3690, unhandled system error (run "
        "with NCCL_DEBUG=INFO for details), NCCL version 2.27.5\nncclSystemError: System call (e.g. socket, malloc) or "
        "external library call failed or device error.\nLast error:\nError while creating shared memory segment"
    )


def sequences(rows: int, begin: bool) -> dict[str, int]:
    """The kernels that joining and cutting values of ``rows`` sequences along their positions takes, over two ranks.

    Raises:
        AssertionError: if what it makes is wrong.
    """
    mesh, rank, here = quintnet.Mesh(tp=2), dist.get_rank(), torch.device(NAME, dist.get_rank())
    transport = DistributedTransport(mesh, device_mesh(mesh, NAME))
    whole = torch.arange(rows * 1024 * 256, dtype=torch.float64).view(rows, 1024, 256)
    half = whole.chunk(2, 1)[rank]
    given, cut = half.to(here).contiguous(), whole.to(here)
    with install().counting() as found:
        run = (lambda *args: transport.start(*args)()) if begin else transport.run
        joined = run("all_gather", given, "tp", 1, 1, 0)
        added = run("reduce_scatter", cut, "tp", 1, 1, 0)
    assert torch.equal(joined.cpu(), whole) and torch.equal(added.cpu(), 2 * half)
    assert torch.equal(given.cpu(), half) and torch.equal(cut.cpu(), whole)
    return dict(found.kernels)


def train_with(fault: str, jobs: Sequence[Job]) -> dict[str, str]:
    """The same with a fault of :mod:`.faults`."""
    FAULTS[fault]()
    return train_all(jobs)
