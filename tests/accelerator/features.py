"""What surrounds a step on emulated accelerators: clipping, evaluation, checkpoints, precisions, generation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import quintnet
from quintnet_compiler.compat.torch import pytree
from quintnet_compiler.simulation.program import simulate_program

from ..models import EVERY, build, reference
from .device import install
from .ranks import Job

STEPS = 3


def surround(job: Job, folder: str) -> list[str]:
    """Clipped steps, evaluations, and a checkpoint of each kind that training goes on from, beside the unsplit module.

    Returns what is not equal.
    """
    case = EVERY[job.model]
    batch = case.batch(8)
    program = quintnet.compile(
        build(job.model, job.dtype), quintnet.Mesh(**job.axes), batch, loss_fn=case.loss_fn, **job.options
    )
    whole = build(job.model, job.dtype)
    mine, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (program, whole))
    wrong: list[str] = []

    def compare(what: str, found: Any, expected: Any) -> None:
        if abs(float(found) - float(expected)) > case.tolerance * max(1.0, abs(float(expected))):
            wrong.append(f"{what}: {float(found)}, not {float(expected)}")

    def step(compared: bool) -> float:
        loss = program.step(batch)
        norm = program.clip_grad_norm(0.1)
        mine.step()
        mine.zero_grad()
        if compared:
            expected, gradients = reference(whole, batch, case.loss_fn)
            for name, parameter in whole.named_parameters():
                parameter.grad = gradients[name]
            compare("loss", loss, expected)
            compare("norm", norm, torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1))
            theirs.step()
            theirs.zero_grad()
            compare("evaluation", program.evaluate(batch), reference(whole, batch, case.loss_fn)[0])
        return float(loss)

    step(True)
    for kind in ("now", "later"):
        if kind == "now":
            program.save(Path(folder) / kind, step=1, optimizer=mine)
        else:
            written = program.save_async(Path(folder) / kind, step=1, optimizer=mine)
        after = [step(kind == "now" and i == 0) for i in range(2)]
        if kind == "later":
            written.result()
        program.load(Path(folder) / kind, optimizer=mine)
        if [step(False) for _ in range(2)] != after:
            wrong.append(f"training goes on elsewhere from the checkpoint of {kind}")
    return wrong


def losses(job: Job, device: str | None) -> list[float]:
    """Of a few steps in low precision, from float32 parameters. ``device``: all ranks are in this process, on it. The
    optimizer is SGD: AdamW's first steps make as much of a small gradient, and of its rounding, as of a large one."""
    case = EVERY[job.model]
    batch = pytree.tree_map(lambda x: x.float() if x.is_floating_point() else x, case.batch(8))
    options = job.options if device is None else {**job.options, "device": device}
    mesh = quintnet.Mesh(**job.axes)
    program = quintnet.compile(build(job.model, torch.float32), mesh, batch, loss_fn=case.loss_fn, **options)
    optimizer = torch.optim.SGD(program.parameters(), lr=0.5)
    found = []
    for _ in range(STEPS):
        found.append(float(program.step(batch)))
        optimizer.step()
        optimizer.zero_grad()
    return found


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _outside(job: Job, batch: Any, more: tuple[str, ...]) -> quintnet.CompiledProgram:
    """A job's program, with more of it on the host."""
    options = {**job.options, "offload": (*job.options.get("offload", ()), *more)}
    model, mesh = build(job.model, job.dtype), quintnet.Mesh(**job.axes)
    return quintnet.compile(model, mesh, batch, loss_fn=EVERY[job.model].loss_fn, **options)


@dataclass(frozen=True)
class UpdateBytes:
    """Bytes that an optimizer on the host takes: of the device at most, beside parameters and gradients; of the host at
    most, and between steps."""

    device: int
    host: int
    kept: int


def update_bytes(job: Job, device: str | None = None) -> tuple[UpdateBytes, UpdateBytes]:
    """Of this rank, as measured, and as simulated of the fullest of its place. ``device``: all ranks are in this
    process, on it."""
    here, batch = install(), EVERY[job.model].batch(8)
    where = torch.device("emulated", dist.get_rank()) if device is None else torch.device(device)
    job = replace(job, options={**job.options, "device": where})
    program = _outside(job, batch, ("optimizer",))
    program.step(batch)
    before = here.extension.requested(where.index)[2]
    optimizer = program.optimizer(adam)
    for _ in range(3):
        program.step(batch)
        staying = here.extension.requested(where.index)[2] - before
        with here.measuring(where.index) as found:
            optimizer.step()
        optimizer.zero_grad()
    state = (x for known in optimizer.inner.state.values() for x in known.values() if isinstance(x, Tensor))
    moments = sum(x.nbytes for x in state if x.dim())
    rows = simulate_program(program._primary().program, program._prices(None), processes=device is None).rows
    place = 0 if device is not None else dist.get_rank() % program.mesh["pp"]
    update = rows[place].update
    assert update is not None and rows[place].host_bytes >= update.host_bytes and str(update.host_bytes)
    measured = UpdateBytes(found.device, staying + found.host + moments, staying + moments)
    return measured, UpdateBytes(update.device_bytes, update.host_bytes, update.kept_bytes)


def all_update_bytes(jobs: list[Job]) -> list[tuple[UpdateBytes, UpdateBytes]]:
    """Of each job what :func:`update_bytes` says."""
    return [update_bytes(job) for job in jobs]


def updated(job: Job, folder: str, *, offload: bool) -> tuple[dict[str, Tensor], int]:
    """This rank's parameters after clipped steps of AdamW and a checkpoint that is loaded in between, and the bytes of
    the device that the optimizer takes. ``offload``: it computes on the host."""
    case, here = EVERY[job.model], install()
    batch = case.batch(8)
    program = _outside(job, batch, ("optimizer",) if offload else ())
    program.step(batch)
    program.zero_grad()
    before = here.extension.requested(here.current_device())[0]
    optimizer = program.optimizer(adam)
    for step in range(4):
        program.step(batch)
        program.clip_grad_norm(0.1)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            program.save(Path(folder), step=1, optimizer=optimizer)
        if step == 2:
            program.load(Path(folder), optimizer=optimizer)
    after = here.extension.requested(here.current_device())[0]
    found = {n: p.detach().to_local().cpu() for n, p in program.named_parameters()}  # type: ignore[attr-defined]
    return found, after - before


def update_all(jobs: list[Job], folder: str) -> list[list[tuple[dict[str, Tensor], int]]]:
    """Of each job what :func:`updated` says, on the device and on the host."""
    return [
        [updated(job, f"{folder}/{index}-{offload}", offload=offload) for offload in (False, True)]
        for index, job in enumerate(jobs)
    ]


def resumed(job: Job, folder: str) -> tuple[dict[str, Tensor], dict[str, Tensor], set[str]]:
    """This rank's parameters after clipped steps of a plain AdamW, and after the last of them from a checkpoint; and
    where its state is."""
    case, here = EVERY[job.model], torch.device("emulated", dist.get_rank())
    batch = tuple(x.to(here) for x in case.batch(8))
    options = {"loss_fn": case.loss_fn, "device": here, **job.options}
    program = quintnet.compile(build(job.model, job.dtype), quintnet.Mesh(**job.axes), batch, **options)
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)

    def trained(steps: int) -> dict[str, Tensor]:
        for _ in range(steps):
            program.step(batch)
            program.clip_grad_norm(0.1)
            optimizer.step()
            optimizer.zero_grad()
        return {n: p.detach().to_local().cpu().clone() for n, p in program.named_parameters()}  # type: ignore[attr-defined]

    trained(2)
    program.save(Path(folder), step=2, optimizer=optimizer)
    first = trained(2)
    program.load(Path(folder), optimizer=optimizer)
    state = {x.device.type for kept in optimizer.state.values() for x in kept.values() if x.dim()}
    return first, trained(2), state


def resume_all(jobs: list[Job], folder: str) -> list[tuple[dict[str, Tensor], dict[str, Tensor], set[str]]]:
    """Of each job what :func:`resumed` says."""
    return [resumed(job, f"{folder}/{index}") for index, job in enumerate(jobs)]


def all_losses(jobs: list[Job]) -> list[list[float]]:
    return [losses(job, None) for job in jobs]


def text(axes: dict[str, int], ids: Tensor, mask: Tensor, new: int) -> Tensor:
    """What a small Llama writes."""
    from ..test_generation import large_model

    program = quintnet.compile(large_model("Llama"), quintnet.Mesh(**axes), {"input_ids": ids}, training=False)
    return program.generate(ids, attention_mask=mask, max_new_tokens=new, pad_token_id=0).cpu()


def surround_all(jobs: list[Job], folder: str) -> dict[str, list[str]]:
    """Of each job what :func:`surround` says."""
    found = {}
    for index, job in enumerate(jobs):
        found[str(job)] = surround(job, f"{folder}/{index}")
        dist.barrier()
    return found
