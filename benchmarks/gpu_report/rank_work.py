"""What one of several ranks does, each in a process of its own: see :mod:`.nccl_ranks`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import quintnet
from quintnet_compiler.core.errors import QuintNetError
from quintnet_compiler.runtime.transport.collectives import Native, collectives
from tests.models import CASES, build

from .entries import Check, line_of
from .layouts import Job, exact
from .setting import Setting

PATIENCE = {"away": 10.0}  # seconds that ranks wait for each other
TWO = (
    Job("gpt", {"tp": 2}, {"sequence_parallel": True}, sample=True),
    Job("gpt", {"dp": 2}, {"zero": 3, "microbatches": 2}),
    Job("gpt", {"pp": 2}, {"microbatches": 4}, sample=True),
    Job("gpt", {"pp": 2}, {"microbatches": 4, "schedule": "zb-h1"}),
    Job("cnn", {"pp": 2}, {"microbatches": 4, "schedule": "interleaved", "virtual_stages": 3}),
    Job("mixture", {"ep": 2}),
    Job("gpt", {"cp": 2}, {"context": "ring"}),
    Job("gpt", {"cp": 2}, {"context": "ulysses"}),
    Job("gpt", {"tp": 2}, {"sequence_parallel": True, "async_tp": True}),
    Job("gpt", {"dp": 2}, {"zero": 1}),
    Job("hf_llama", {"tp": 2}),
)
FOUR = (
    Job("gpt", {"pp": 2, "tp": 2}, {"microbatches": 2}),
    Job("gpt", {"dp": 2, "tp": 2}, {"zero": 3}),
    Job("gpt", {"dp": 2, "pp": 2}, {"zero": 1, "microbatches": 2}),
    Job("gpt", {"pp": 4}, {"microbatches": 8}),
    Job("mixture", {"dp": 2, "ep": 2}, {"microbatches": 2}),
    Job("gpt", {"cp": 2, "tp": 2}, {"context": "ring"}),
    Job("mlp", {"pp": 4}, {"microbatches": 8, "schedule": "dualpipe-v", "virtual_stages": 2}, sample=True),
)
EIGHT = (
    Job("gpt", {"dp": 2, "pp": 2, "tp": 2}, {"microbatches": 4, "zero": 1}),
    Job("gpt", {"dp": 8}, {"zero": 3}),
)
JOBS: Mapping[int, tuple[Job, ...]] = MappingProxyType({2: TWO, 4: FOUR, 8: EIGHT})


@dataclass(frozen=True)
class Rank:
    """``folder``: that all ranks of this work share."""

    rank: int
    size: int
    device: torch.device
    folder: Path

    @property
    def last(self) -> bool:
        return self.rank == self.size - 1

    def program(self, axes: dict[str, int], **plan: Any) -> tuple[quintnet.CompiledProgram, Any]:
        case = CASES["gpt"]
        batch = case.batch(8)
        mesh, loss_fn = quintnet.Mesh(**axes), case.loss_fn
        return quintnet.compile(build("gpt"), mesh, batch, loss_fn=loss_fn, device=self.device, **plan), batch


def check_collectives(here: Rank) -> Iterator[Check]:
    """Each collective of the transport, at once and started, beside what it means: equal bit by bit."""
    assert dist.group.WORLD is not None
    group, size = collectives(dist.group.WORLD), here.size
    inputs = [torch.arange(64.0 * size).double().view(size, 64) + 1000 * rank for rank in range(size)]
    mine, total = inputs[here.rank].to(here.device), sum(inputs[1:], inputs[0])
    joined, own_rows = torch.cat(inputs), total[here.rank : here.rank + 1]
    wanted = {
        "all_reduce": total,
        "add": total,
        "all_gather": joined,
        "reduce_scatter": own_rows,
        "all_to_all": torch.stack([x[here.rank] for x in inputs]),
        "permute": inputs[(here.rank + 1) % size],
        "all_gather_each": torch.cat([joined, *(x[:1] for x in inputs)]),
        "reduce_scatter_each": torch.cat([own_rows, 2 * own_rows]),
    }
    for later in (False, True):
        calls = _calls(group, mine, later)
        wrong = [name for name, want in wanted.items() if not torch.equal(calls[name]().cpu().view_as(want), want)]
        moment = "started" if later else "at once"
        yield Check(f"{len(wanted)} collectives of {size} ranks, {moment}", not wrong, ", ".join(wrong) or "all equal")


def _calls(group: Native, mine: Tensor, later: bool) -> dict[str, Callable[[], Tensor]]:
    size = group.size
    row, whole = mine.new_empty(1, 64), mine.new_empty(size * size, 64)
    ring = tuple((rank + 1) % size for rank in range(size))
    rooms, parts = [whole, mine.new_empty(size, 64)], [row, torch.empty_like(row)]
    return {
        "all_reduce": lambda: group.all_reduce(mine.clone(), later)(),
        "add": lambda: group.add(mine.clone(), later)(),
        "all_gather": lambda: group.all_gather(mine, whole, later)(),
        "reduce_scatter": lambda: group.reduce_scatter(mine, row, later)(),
        "all_to_all": lambda: group.all_to_all(mine, torch.empty_like(mine), later)(),
        "permute": lambda: group.permute(mine, ring)(),
        "all_gather_each": lambda: torch.cat(list(group.all_gather_each([mine, mine[:1]], rooms, later)())),
        "reduce_scatter_each": lambda: torch.cat(list(group.reduce_scatter_each([mine, 2 * mine], parts, later)())),
    }


def check_layouts(here: Rank, *, sample: bool = False) -> Iterator[Check]:
    """Models of the tests: loss and gradients in float64 beside the unsplit module on the CPU."""
    for job in JOBS[here.size]:
        if job.sample or not sample:
            good, details = exact(Setting(here.device, emulated=False), job)
            yield Check(f"{job}, {here.size} ranks", good, details)


def check_sample(here: Rank) -> Iterator[Check]:
    return check_layouts(here, sample=True)


def check_errors(here: Rank) -> Iterator[Check]:
    """A checkpoint is written; then NaN in a parameter is the same error on all ranks."""
    program, batch = here.program({"dp": here.size}, zero=3)
    program.step(batch)
    program.save(here.folder / "checkpoint", step=1)
    loss = float(program.step(batch))
    if here.rank == 0:
        (here.folder / "loss.txt").write_text(repr(loss))
    part = next(iter(program.parameters())).to_local()  # type: ignore[attr-defined]
    part.detach().fill_(float("nan"))
    yield _raises("NaN in a parameter", "QN501", lambda: program.step(batch))


def _raises(what: str, code: str, step: Callable[[], object]) -> Check:
    try:
        step()
    except QuintNetError as error:
        return Check(what, error.code == code, f"{error.code} {error.message.splitlines()[0]}"[:300])
    return Check(what, False, "no error")


def check_other_layout(here: Rank) -> Iterator[Check]:
    """The checkpoint that ranks of ``dp`` wrote, read by ranks of ``tp``."""
    program, batch = here.program({"tp": here.size})
    program.load(here.folder / "checkpoint")
    loss, old_loss = float(program.step(batch)), float((here.folder / "loss.txt").read_text())
    off = abs(loss - old_loss) / abs(old_loss)
    yield Check("a checkpoint of dp, zero 3, read by tp", off < 1e-9, f"loss {off:.0e}")


def rank_has_another_batch(here: Rank) -> Iterator[Check]:
    """The last rank is given fewer rows, after two steps."""
    program, batch = here.program({"dp": here.size}, zero=3)
    for _ in range(2):
        program.step(batch)
    fewer = tuple(x[:4] if x.dim() else x for x in batch)
    program.step(fewer if here.last else batch)
    yield Check("a step on unlike batches", False, "no error")


def rank_ends(here: Rank) -> Iterator[Check]:
    """The last rank ends after two steps; the others train on."""
    yield from _steps_alone(here, lambda: os._exit(7))


def rank_stays_away(here: Rank) -> Iterator[Check]:
    """The last rank is alive, and does not come to the third step."""
    yield from _steps_alone(here, lambda: time.sleep(3600))


def _steps_alone(here: Rank, leave: Callable[[], object]) -> Iterator[Check]:
    program, batch = here.program({"dp": here.size}, zero=1)
    for _ in range(2):
        program.step(batch)
        program.zero_grad()
    if here.last:
        leave()
    program.step(batch)
    program.step(batch)
    yield Check("a step without a rank", False, "no error")


WORKS: Mapping[str, Callable[[Rank], Iterator[Check]]] = MappingProxyType(
    {
        "collectives": check_collectives,
        "layouts": check_layouts,
        "sample": check_sample,
        "errors": check_errors,
        "files": check_other_layout,
        "other": rank_has_another_batch,
        "ends": rank_ends,
        "away": rank_stays_away,
    }
)


def main() -> None:
    work, rank, size, port, kind, folder = sys.argv[1:]
    here = Rank(int(rank), int(size), torch.device(kind), Path(folder))
    torch.set_num_threads(1)
    backend: dict[str, Any] = {"backend": "gloo"}
    if here.device.type == "cuda":
        torch.cuda.set_device(here.device)
        torch.cuda.set_per_process_memory_fraction(0.9 / here.size)
        backend = {"backend": "nccl", "device_id": here.device}
    timeout = timedelta(seconds=PATIENCE.get(work, 60.0))
    store = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(**backend, init_method=store, rank=here.rank, world_size=here.size, timeout=timeout)
    with (here.folder / f"{work}.{rank}.jsonl").open("w") as file:
        for check in WORKS[work](here):
            file.write(line_of(check))
            file.flush()
    sys.stdout.flush()
    os._exit(0)  # nothing that communicates at the end
