"""What torchrun starts in tests: trains, and hurts itself once."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import quintnet
from tests.models import CASES, build


def train(what: str, folder: str, steps: int) -> float:
    """Steps with a checkpoint after each; the last loss."""
    here = Path(folder)
    rank, size = dist.get_rank(), dist.get_world_size()
    case = CASES["mlp"]
    program = quintnet.compile(build("mlp"), quintnet.Mesh(dp=size), case.batch(8), loss_fn=case.loss_fn)
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)
    first = program.load(here, optimizer=optimizer).step if list(here.glob("step-*")) else 0
    loss = 0.0
    for step in range(first, steps):
        if step == 3 and rank == size - 1 and what in ("kill", "stop") and not (here / "struck").exists():
            (here / "struck").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        loss = float(program.step(case.batch(8)))
        (here / f"at{rank}").write_text(f"{step} {time.time()}")
        optimizer.step()
        optimizer.zero_grad()
        program.save(here, step=step + 1, optimizer=optimizer, keep=2)
        if what == "slow":
            time.sleep(0.3)
    return loss


if __name__ == "__main__":
    what, folder, steps, ranks, patience = sys.argv[1:]
    found = quintnet.launch(train, int(ranks), (what, folder, int(steps)), collective_timeout=float(patience))
    (Path(folder) / f"result{os.environ['RANK']}").write_text(json.dumps(found[int(os.environ["RANK"])]))
