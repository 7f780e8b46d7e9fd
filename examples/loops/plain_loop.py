"""A training loop without a library, as torchtitan has it: schedules, clipping, accumulation, checkpoints, resuming.

python examples/loops/plain_loop.py --mesh pp=2 --out runs/plain
python examples/loops/plain_loop.py --mesh tp=2 --out runs/plain   # goes on from the newest checkpoint

What differs from a loop on one device is marked; without a mesh, ``run`` is that loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from small import Texts, language_model, main
from torch.utils.data import DataLoader

import quintnet

STEPS, ROWS, PARTS, EVERY = 6, 4, 2, 2


def run(mesh: quintnet.Mesh | None, out: str, steps: int) -> list[float]:
    """The losses of the steps that were run."""
    model: Any = language_model()
    loader = DataLoader(Texts(ROWS * PARTS * STEPS), batch_size=ROWS)
    batches = list(loader)
    program = None if mesh is None else quintnet.compile(model, mesh, batches[0])  # 1
    optimizer = torch.optim.AdamW(model.parameters() if program is None else program.parameters(), lr=1e-2)  # 2
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    first, losses = 0, list[float]()
    if program is not None and any(Path(out).glob("step-*")):
        restored = program.load(out, optimizer=optimizer)  # 3
        first = restored.step
        schedule.load_state_dict(restored.extra["schedule"])
    for step in range(first, min(steps, STEPS)):
        total = 0.0
        for batch in batches[step * PARTS : (step + 1) * PARTS]:
            if program is None:
                loss = model(**batch).loss
                loss.backward()
            else:
                loss = program.step(batch)  # 4
            total += float(loss.detach()) / PARTS
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.div_(PARTS)
        if program is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        else:
            program.clip_grad_norm(0.5)  # 5
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total)
        if program is not None and (step + 1) % EVERY == 0:
            extra = {"schedule": schedule.state_dict()}
            program.save(out, step=step + 1, optimizer=optimizer, extra=extra, keep=2)
    return losses


if __name__ == "__main__":
    main(__doc__, run, out="runs/plain", steps=STEPS)
