"""Compare steps whose communication is late, bit by bit, with other steps; and count what makes hosts wait."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import quintnet
from tests.models import CASES, build

from .entries import Check, Entry
from .late import late_worlds
from .layouts import Job, narrow_batch
from .setting import Setting

STEPS = 2
JOBS = (
    Job("gpt", {"tp": 2}, {"sequence_parallel": True, "microbatches": 2}, sample=True),
    Job("gpt", {"dp": 2}, {"zero": 3, "microbatches": 2}, sample=True),
    Job("gpt", {"pp": 2}, {"microbatches": 4}, sample=True),
    Job("gpt", {"cp": 2}, {"context": "ring"}),
    Job("gpt", {"tp": 2}, {"sequence_parallel": True, "async_tp": True}),
    Job("gpt", {"dp": 2}, {"zero": 1, "microbatches": 2}),
    Job("gpt", {"dp": 2}, {"zero": 2}),
    Job("gpt", {"pp": 2}, {"microbatches": 4, "schedule": "zb-h1"}),
    Job("gpt", {"pp": 2, "dp": 2}, {"microbatches": 4, "zero": 3}),
    Job("mixture", {"ep": 2}),
)
DENSE = Job("gpt", {"dp": 1}, {"microbatches": 2})


def run(setting: Setting) -> Iterator[Entry]:
    for job in JOBS:
        if job.sample or not setting.emulated:
            try:
                yield _late(setting, job)
            except Exception as error:  # what is read too soon may be anything, and so may what it leads to
                yield Check(f"late communication: {job}", False, f"{type(error).__name__}: {error}"[:600])
    yield from _waits(setting)


def _program(setting: Setting, job: Job, dtype: torch.dtype = torch.float32) -> quintnet.CompiledProgram:
    case = CASES[job.model]
    options = {"loss_fn": case.loss_fn, "device": setting.device, "check": "off", **job.options}
    return quintnet.compile(build(job.model, dtype), quintnet.Mesh(**job.axes), narrow_batch(job), **options)


def _steps(program: quintnet.CompiledProgram, job: Job) -> list[Tensor]:
    """Return loss and gradients of all steps, on the host."""
    tensors: list[Tensor] = []
    for _ in range(STEPS):
        tensors.append(program.step(narrow_batch(job)).detach().cpu())
        tensors += [p.grad.full_tensor().cpu() for _, p in program.named_parameters() if p.grad is not None]  # type: ignore[attr-defined]
        program.zero_grad()
    return tensors


def _late(setting: Setting, job: Job) -> Check:
    expected = _steps(_program(setting, job), job)
    with late_worlds(setting) as worlds:
        computed = _steps(_program(setting, job), job)
    equal = sum(torch.equal(x, y) for x, y in zip(computed, expected, strict=True))
    waited = sum(world.waited for world in worlds)
    details = f"{equal} of {len(expected)} tensors equal bit by bit, {waited} waits for what was started"
    return Check(f"late communication: {job}", equal == len(expected) and waited > 0, details)


def _waits(setting: Setting) -> Iterator[Entry]:
    """Check that the host waits once in a step of a dense model: to learn whether all gradients are finite."""
    program = _program(setting, DENSE)
    batch = tuple(x.to(setting.device) for x in narrow_batch(DENSE))
    for _ in range(3):
        program.step(batch)
        program.zero_grad()
    waits = host_waits(setting, lambda: program.step(batch))
    yield Check("the host waits once in a step of a dense model", len(waits) == 1, "; ".join(waits))


def host_waits(setting: Setting, work: Callable[[], object]) -> list[str]:
    """Return the calls that make the host wait for the device while ``work`` runs."""
    if setting.emulated:
        from tests.accelerator.device import install

        with install().counting() as counted:
            work()
        return [name for name, count in counted.waits.items() for _ in range(count)]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [f"{w.filename.rpartition('/')[2]}:{w.lineno}" for w in said if "called a synchronizing" in str(w.message)]
