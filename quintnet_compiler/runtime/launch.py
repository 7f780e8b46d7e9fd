"""Start local processes, one per rank."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from ..errors import QuintNetError, RunError


def launch(
    fn: Callable[..., Any], num_ranks: int, args: Sequence[Any] = (), *, timeout: float = 600.0, threads: int = 1
) -> list[Any]:
    """Run ``fn(*args)`` on ``num_ranks`` ranks and return its results by rank.

    Starts processes on this machine that talk over loopback (gloo, or NCCL where each has a GPU). Under torchrun the
    environment's world is used instead: ``fn`` runs once, here, and the list holds this rank's result at its place.

    Args:
        fn: a function at the top level of a module, so that other processes can import it.
        timeout: seconds after which everything is ended.
        threads: torch threads per process.

    Raises:
        RunError: QN302 if a process fails, with the first failure; all others are ended. A QuintNetError that
            ``fn`` raised is raised as it is.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return _inside_torchrun(fn, num_ranks, args)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.tensor", "quintnet_compiler.api"])
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_work, args=(fn, args, rank, num_ranks, f"{folder}/store", theirs, threads, timeout), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            results = _collect(pipes, processes, time.monotonic() + timeout)
            for process in processes:
                process.join(5)  # so that each can leave in its own way
            return results
        finally:
            for process in processes:
                if process.is_alive():
                    process.terminate()
            for process in processes:
                process.join(5)
                if process.is_alive():
                    process.kill()


def _collect(pipes: list[Connection], processes: list[Any], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    open_pipes = dict(zip(pipes, range(len(pipes)), strict=True))
    while open_pipes:
        ready = wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            late = sorted(open_pipes.values())
            raise RunError("QN302", f"ranks {late} did not finish in time", fix="give launch a longer timeout=")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = open_pipes.pop(pipe)
            try:
                ok, value = pickle.loads(pipe.recv_bytes())  # from a process that this one started
            except EOFError:
                processes[rank].join(5)
                raise RunError("QN302", f"rank {rank} ended with exit code {processes[rank].exitcode}") from None
            if not ok:
                error, text = value
                if isinstance(error, QuintNetError):
                    raise error
                raise RunError("QN302", f"rank {rank} raised {text}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _work(
    fn: Callable[..., Any],
    args: Sequence[Any],
    rank: int,
    num_ranks: int,
    store: str,
    pipe: Connection,
    threads: int,
    timeout: float,
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    torch.set_num_threads(threads)
    answer: tuple[bool, Any]
    try:
        nccl = torch.cuda.is_available() and torch.cuda.device_count() >= num_ranks
        if nccl:
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "nccl" if nccl else "gloo",
            store=FileStore(store, num_ranks),
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout),
        )
        answer = True, fn(*args)
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        answer = False, (error if isinstance(error, QuintNetError) else None, text)
    # plain pickle: multiprocessing's own would share tensors' memory, which ends with this process
    try:
        packed = pickle.dumps(answer)
    except Exception as error:
        packed = pickle.dumps((False, (None, f"a result that cannot be sent to the launching process: {error}")))
    pipe.send_bytes(packed)
    pipe.close()
    if answer[0]:
        dist.destroy_process_group()


def _inside_torchrun(fn: Callable[..., Any], num_ranks: int, args: Sequence[Any]) -> list[Any]:
    started = not dist.is_initialized()
    if started:
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if dist.get_world_size() != num_ranks:
        raise RunError(
            "QN301",
            f"launch was asked for {num_ranks} ranks, and the world has {dist.get_world_size()}",
            fix=f"torchrun --nproc-per-node {num_ranks}",
        )
    results: list[Any] = [None] * num_ranks
    results[dist.get_rank()] = fn(*args)
    if started:
        dist.destroy_process_group()
    return results
