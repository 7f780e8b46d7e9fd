"""Several processes on one device: everything that many devices need but NCCL itself."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from .entries import Check, Entry
from .layouts import Job, exact
from .setting import Setting
from .staged import NAME, register

TWO = (
    Job("gpt", {"tp": 2}, {"sequence_parallel": True}, sample=True),
    Job("gpt", {"pp": 2}, {"microbatches": 2}, sample=True),
    Job("gpt", {"dp": 2}, {"zero": 3, "microbatches": 2}, sample=True),
    Job("mixture", {"ep": 2}, sample=True),
    Job("gpt", {"cp": 2}, {"context": "ring"}, sample=True),
    Job("gpt", {"tp": 2}, {"sequence_parallel": True, "async_tp": True}),
    Job("gpt", {"dp": 2}, {"zero": 1}),
    Job("gpt", {"pp": 2}, {"microbatches": 4, "schedule": "zb-h1"}),
    Job("cnn", {"pp": 2}, {"microbatches": 4, "schedule": "interleaved", "virtual_stages": 3}),
    Job("hf_llama", {"tp": 2}),
)
FOUR = (
    Job("gpt", {"pp": 2, "tp": 2}, {"microbatches": 2}),
    Job("gpt", {"dp": 2, "tp": 2}, {"zero": 3}),
    Job("gpt", {"dp": 2, "pp": 2}, {"zero": 1, "microbatches": 2}),
)


def run(setting: Setting) -> Iterator[Entry]:
    for size, jobs in ((2, TWO), (4, FOUR)):
        mine = [job for job in jobs if job.sample or not setting.emulated]
        if mine:
            yield from _on(size, mine, setting)


def _on(size: int, jobs: Sequence[Job], setting: Setting) -> Iterator[Entry]:
    """Check each of ``jobs`` on ``size`` processes against the unsplit module."""
    with tempfile.TemporaryDirectory() as folder:
        pool = ProcessPoolExecutor(size, multiprocessing.get_context("spawn"))
        store = str(Path(folder) / "store")
        ranks = [pool.submit(train, store, rank, size, jobs, emulated=setting.emulated) for rank in range(size)]
        results = [rank.result() for rank in ranks]
        for index, job in enumerate(jobs):
            good = all(rank[index][0] for rank in results)
            details = " | ".join(dict.fromkeys(rank[index][1] for rank in results))
            yield Check(f"{job}, {size} processes", good, details)


def train(store: str, rank: int, size: int, jobs: Sequence[Job], *, emulated: bool) -> list[tuple[bool, str]]:
    """Return one rank's result of each job."""
    torch.set_num_threads(1)
    setting = Setting.here(emulated=emulated)
    torch.zeros(1, device=setting.device)  # so that nobody chooses another device by the rank
    register(setting.device.type)
    dist.init_process_group(
        NAME, init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    return [exact(setting, job) for job in jobs]
