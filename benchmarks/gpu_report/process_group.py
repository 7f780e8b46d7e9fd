"""The accelerator's own process group (NCCL) with one rank: the way that every rank of many goes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import quintnet
from quintnet_compiler.runtime.backends.processes import ProcessBackend
from quintnet_compiler.runtime.launch.accelerator import take_accelerator
from quintnet_compiler.runtime.transport.collectives import Native, collectives
from tests.models import CASES, build

from .entries import Check, Entry, NotRun
from .layouts import Job, exact
from .setting import Setting

JOBS = (
    Job("gpt", {"dp": 1}, {"microbatches": 2}),
    Job("mixture", {"dp": 1}),
    Job("gpt", {"dp": 1}, {"recompute": "full"}),
)


def run(setting: Setting) -> Iterator[Entry]:
    if setting.emulated:
        from tests.accelerator.process_group import register

        register()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        options = take_accelerator(0)
        dist.init_process_group(**options, init_method=store, rank=0, world_size=1)
        yield Check("the group connects when it is made", "device_id" in options, str(options))
        yield from _programs(setting)
        yield from _collectives(setting)
        yield from _digests(setting)


def _programs(setting: Setting) -> Iterator[Entry]:
    for job in JOBS:
        good, details = exact(setting, job)
        yield Check(f"{job}, float64", good, details)
    case = CASES["mlp"]
    program = quintnet.compile(build("mlp"), quintnet.Mesh(dp=1), case.batch(8), loss_fn=case.loss_fn)
    program.step(case.batch(8))
    backend = type(program._state()).__name__
    yield Check("one rank runs as one of many does", backend == ProcessBackend.__name__, backend)


def _collectives(setting: Setting) -> Iterator[Entry]:
    """Check each collective of the transport, at once and started, in place and not."""
    assert dist.group.WORLD is not None
    group = collectives(dist.group.WORLD)
    yield Check("collectives are the backend's own", type(group) is Native, type(group).__name__)
    calls: dict[str, Callable[[Tensor, bool], Tensor]] = {
        "all_reduce": lambda x, later: group.all_reduce(x, later)(),
        "all_reduce in place": lambda x, later: group.add(x, later)(),
        "all_gather": lambda x, later: group.all_gather(x, torch.empty_like(x), later)(),
        "all_gather in place": lambda x, later: group.all_gather(x, x, later)(),
        "reduce_scatter": lambda x, later: group.reduce_scatter(x, torch.empty_like(x), later)(),
        "reduce_scatter in place": lambda x, later: group.reduce_scatter(x, x, later)(),
        "permute": lambda x, later: group.permute(x, (0,))(),
    }
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(64, 32).to(dtype)
        wrong = [
            f"{name}{', started' if later else ''}"
            for name, call in calls.items()
            for later in (False, True)
            if not torch.equal(call(x.to(setting.device), later).cpu(), x)
        ]
        yield Check(f"{len(calls)} collectives of one rank, {dtype}", not wrong, ", ".join(wrong) or "all equal")


def _digests(setting: Setting) -> Iterator[Entry]:
    """Check that ranks of one node, which have different devices, have the same program."""
    what = "programs for device 0 and device 1 are the same"
    case, digests = CASES["gpt"], []
    try:
        for index in (0, 1):
            device = torch.device(setting.device.type, index)
            program = quintnet.compile(build("gpt"), quintnet.Mesh(dp=1), case.batch(8), device=device, check="off")
            digests.append(program._primary().program.digest)
    except RuntimeError as error:
        yield NotRun(what, f"there is no device 1 here: {str(error).splitlines()[0]}")
        return
    yield Check(what, digests[0] == digests[1], " ".join(text[:12] for text in digests))
