"""Runs several implementations of one training step side by side, in the same processes.

Steps alternate between the peers, so that whatever else the machine does hits all of them; what counts is the
ratio within a round. Every peer's loss and gradients are compared with the unsplit model before anything is
timed. A peer that fails, hangs or computes something else is reported with its error, and the others are
measured without it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from models import Batch, Llama, Size, build_model, loss_fn, make_batch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

WARMUP = 3
BATCHES = 4  # steps cycle through this many batches
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Peer:
    """One implementation of the training step, on one rank."""

    step: Callable[[Batch], Tensor | None]
    """Forward, backward, settled gradients of the global batch; the loss, or None on a rank that has none."""
    parameters: Iterable[nn.Parameter]
    """Whose gradients are cleared before every step."""
    gradients: Callable[[], Mapping[str, Tensor]]
    """The whole gradients that this rank can see, under the model's names; all ranks call it together."""
    code: int = 0
    """Bytes that its libraries took when the builder loaded them: as many for a model of any size."""


Builder = Callable[[Llama, Batch], Peer]
"""Makes a rank's peer from its own copy of the model; a top-level function or a partial of one."""


@dataclass(frozen=True)
class Job:
    """Peers to measure, on a number of processes."""

    ranks: int
    size: Size
    rows: int
    rounds: int
    builders: Mapping[str, Builder]
    timeout: float
    model: Callable[[Size], Any] = build_model
    """Makes the model that all peers train; a top-level function."""


@dataclass(frozen=True)
class Check:
    """The relative errors of a peer against the unsplit model."""

    loss: float
    gradients: float


@dataclass
class RankResult:
    """The measurements of one rank; lists are by round."""

    wall: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    checks: dict[str, Check] = field(default_factory=dict)
    resident: dict[str, int] = field(default_factory=dict)
    """Bytes that a peer keeps between steps, beside ``code``: parameters, gradients if not freed, its program."""
    code: dict[str, int] = field(default_factory=dict)
    """Bytes of libraries that a peer loaded itself; what this file and all builders import is not counted."""
    peak: dict[str, int] = field(default_factory=dict)
    """Bytes that a step adds to them at its worst moment."""
    wire: dict[str, int | None] = field(default_factory=dict)
    """Bytes that all ranks together sent in a step; None where it cannot be read."""
    elapsed: float = 0.0
    """Seconds that all rounds took."""
    own_cpu: float = 0.0
    """Seconds of CPU time that this process used in them."""
    machine_cpu: float | None = None
    """Seconds of CPU time that everything on the machine used in them; None where it cannot be read."""


class PeerFailure(Exception):
    """A peer raised, hung, ended its process or disagreed with the unsplit model."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"{peer}: {reason}")
        self.peer = peer
        self.reason = reason


def measure(job: Job) -> tuple[list[RankResult], dict[str, str]]:
    """Measure all peers in one run; peers that fail are left out, and their errors returned by name."""
    errors: dict[str, str] = {}
    while True:
        left = {name: build for name, build in job.builders.items() if name not in errors}
        if not left:
            return [], errors
        try:
            return _run(replace(job, builders=left)), errors
        except PeerFailure as failure:
            if failure.peer not in left:  # the harness itself: running again would not help
                raise
            errors[failure.peer] = failure.reason


# -- the parent: starts the ranks, collects, and ends only what it started


def _run(job: Job) -> list[RankResult]:
    context = mp.get_context("spawn")
    pipes: list[Connection] = []
    processes: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(job.ranks):
                ours, theirs = context.Pipe(duplex=False)
                args = (job, rank, f"{folder}/store", theirs)
                process = context.Process(target=_rank_main, args=args, daemon=True)
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            results = _collect(pipes, time.monotonic() + job.timeout)
            for process in processes:
                process.join(10)
            return results
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pipes: list[Connection], deadline: float) -> list[RankResult]:
    """Messages are ("phase", peer), ("failed", reason) and ("done", result)."""
    phase = ["harness"] * len(pipes)
    results: dict[int, RankResult] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = next(rank for rank in range(len(pipes)) if rank not in results)
            raise PeerFailure(phase[late], f"did not finish in time on rank {late}")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = pipes.index(pipe)
            try:
                kind, value = pipe.recv()
            except EOFError:
                raise PeerFailure(phase[rank], f"the process of rank {rank} ended") from None
            if kind == "phase":
                phase[rank] = value
            elif kind == "failed":
                raise PeerFailure(phase[rank], value)
            else:
                results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


# -- one rank


def _rank_main(job: Job, rank: int, store: str, pipe: Connection) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, job.ranks),
            rank=rank,
            world_size=job.ranks,
            timeout=timedelta(seconds=job.timeout),
        )
        result = _measure_rank(job, lambda peer: pipe.send(("phase", peer)))
    except Exception:
        pipe.send(("failed", traceback.format_exc()))
        return
    pipe.send(("done", result))
    dist.barrier()  # nobody leaves while another rank still needs its connections
    dist.destroy_process_group()


def _measure_rank(job: Job, enter: Callable[[str], None]) -> RankResult:
    result = RankResult()
    batches = [make_batch(job.size, job.rows, index) for index in range(BATCHES)]
    expected, gradients = _reference(job, batches)
    peers: dict[str, Peer] = {}
    for name, build in job.builders.items():
        enter(name)
        gc.collect()
        baseline = allocated_bytes() or 0
        peers[name] = build(job.model(job.size), batches[0])
        result.checks[name] = _check(peers[name], batches[0], expected[0], gradients)
        for index in range(1, WARMUP):
            _timed_step(peers[name], batches[index % BATCHES])
        _clear(peers[name])
        gc.collect()
        result.code[name] = peers[name].code
        result.resident[name] = (allocated_bytes() or 0) - baseline - result.code[name]
        result.peak[name], result.wire[name] = _weigh_step(peers[name], batches[0])
    del gradients
    names = list(peers)
    for store in (result.wall, result.cpu, result.losses):
        store |= {name: [] for name in names}
    began = time.perf_counter(), time.process_time(), _machine_cpu()
    gc.disable()  # a collection in the middle of a step would be charged to whoever is running
    for index in range(job.rounds):
        gc.collect()
        first = index % len(names)  # nobody always runs after the same peer
        for name in names[first:] + names[:first]:
            enter(name)
            wall, cpu, loss = _timed_step(peers[name], batches[index % BATCHES])
            if loss is not None:
                _require_close(loss, expected[index % BATCHES])
                result.losses[name].append(loss)
            result.wall[name].append(wall)
            result.cpu[name].append(cpu)
    enter("harness")
    result.elapsed = time.perf_counter() - began[0]
    result.own_cpu = time.process_time() - began[1]
    after = _machine_cpu()
    result.machine_cpu = None if began[2] is None or after is None else after - began[2]
    return result


def _machine_cpu() -> float | None:
    """Seconds of CPU time used by all processes since the machine started (Linux)."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _, _, irq, softirq = (int(x) for x in file.readline().split()[1:8])
    except OSError:
        return None
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _clear(peer: Peer) -> None:
    for parameter in peer.parameters:
        parameter.grad = None


def _sent_bytes() -> int | None:
    """Bytes that this machine sent to itself since it started (Linux)."""
    try:
        with open("/proc/net/dev") as file:
            return next(int(line.split()[9]) for line in file if line.strip().startswith("lo:"))
    except (OSError, StopIteration):
        return None


class _Allocated(ctypes.Structure):
    """The result of glibc's mallinfo2."""

    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "mapped", "u", "f", "used")]
    _fields_ += [("free", ctypes.c_size_t), ("keepcost", ctypes.c_size_t)]


def allocated_bytes() -> int | None:
    """Bytes that this process has allocated, by whatever thread (Linux)."""
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    ask.restype = _Allocated
    now = ask()
    return int(now.mapped + now.used)


class _Peak(TorchDispatchMode):
    """The most bytes that were allocated after any operator."""

    def __init__(self) -> None:
        super().__init__()
        self.most = allocated_bytes() or 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.most = max(self.most, allocated_bytes() or 0)
        return result


def _weigh_step(peer: Peer, batch: Batch) -> tuple[int, int | None]:
    """Return the peak bytes that a step allocates, and the bytes that all ranks send."""
    _clear(peer)
    dist.barrier()
    sent_before = _sent_bytes()
    dist.barrier()
    baseline = allocated_bytes() or 0
    with _Peak() as peak:
        peer.step(batch)
    dist.barrier()
    sent_after = _sent_bytes()
    dist.barrier()
    return peak.most - baseline, None if sent_before is None or sent_after is None else sent_after - sent_before


def _timed_step(peer: Peer, batch: Batch) -> tuple[float, float, float | None]:
    """Seconds of wall time and of this process's CPU time, and the loss."""
    _clear(peer)
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    loss = peer.step(batch)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return wall, cpu, None if loss is None else loss.item()


# -- the unsplit model


def _reference(job: Job, batches: list[Batch]) -> tuple[list[float], dict[str, Tensor]]:
    """The unsplit model's loss of every batch and its gradients of the first."""
    model = job.model(job.size)
    losses = []
    for index, (tokens, targets) in enumerate(batches):
        with torch.set_grad_enabled(index == 0):
            loss = loss_fn(model(tokens), targets)
        if index == 0:
            loss.backward()
        losses.append(loss.item())
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _check(peer: Peer, batch: Batch, expected: float, gradients: Mapping[str, Tensor]) -> Check:
    _, _, loss = _timed_step(peer, batch)
    if loss is not None:
        _require_close(loss, expected)
    computed = peer.gradients()
    # Relative to the parameter's largest gradient, with a floor: some are zero but for rounding.
    floor = 1e-3 * max(gradient.abs().max().item() for gradient in gradients.values())
    worst = 0.0
    for name, gradient in computed.items():
        want = gradients[name]
        error = (gradient - want).abs().max().item() / max(want.abs().max().item(), floor)
        if not error <= TOLERANCE:
            raise AssertionError(f"the gradient of {name} is off by {error:.1e}")
        worst = max(worst, error)
    seen: list[set[str]] = [set()] * dist.get_world_size()
    dist.all_gather_object(seen, set(computed))
    if missing := set(gradients) - set[str]().union(*seen):
        raise AssertionError(f"no rank has the gradients of {', '.join(sorted(missing))}")
    return Check(0.0 if loss is None else abs(loss - expected) / abs(expected), worst)


def _require_close(loss: float, expected: float) -> None:
    if not abs(loss - expected) <= TOLERANCE * abs(expected):
        raise AssertionError(f"the loss is {loss}, and the unsplit model's is {expected}")
