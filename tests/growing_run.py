"""A run that goes on with whatever number of ranks there is. Under torchrun: ``-m tests.growing_run FOLDER RANKS``."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import quintnet

ROWS, BATCH = 48, 12


class Watch(quintnet.Callback):
    """Writes down each step, as 'step ranks loss', and lets things happen. ``pause``: seconds after each step, until
    there is a file ``hurry``."""

    def __init__(self, folder: Path, pause: float, loses: bool) -> None:
        self.folder, self.pause, self.loses = folder, pause, loses
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def on_step(self, trainer: quintnet.Trainer, loss: torch.Tensor) -> None:
        step = trainer.history.step
        if self.rank == 0:
            with (self.folder / "steps").open("a") as file:
                file.write(f"{step} {self.size} {float(loss)!r}\n")
        if self.pause and not (self.folder / "hurry").exists():
            time.sleep(self.pause)
        if self.loses and self.rank == 1 and step == 3 and not (self.folder / "lost").exists():
            (self.folder / "lost").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.loses and self.size == 1 and step >= 6:  # there is room for two again
            (self.folder / "back").touch()
            time.sleep(0.3)


def train(folder: str, steps: int, pause: float = 0.0, loses: bool = False) -> list[torch.Tensor]:
    """The weights in the end."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, 16, generator=generator, dtype=torch.float64)
    data = TensorDataset(x, torch.randint(8, (ROWS,), generator=generator))
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 8)).double()
    mesh = quintnet.Mesh(dp=dist.get_world_size() if dist.is_initialized() else 1)
    program = quintnet.compile(model, mesh, data[:BATCH], loss_fn=F.cross_entropy, device="cpu", check="off")
    trainer = quintnet.Trainer(
        program,
        torch.optim.AdamW(program.parameters(), lr=1e-2),
        DataLoader(data, batch_sampler=quintnet.BatchSampler(ROWS, BATCH, seed=3)),
        epochs=steps,
        max_steps=steps,
        checkpoint_folder=Path(folder) / "checkpoints",
        save_every=2,
        console=False,
        log_every=0,
        callbacks=[Watch(Path(folder), pause, loses)],
    )
    trainer.fit()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in program.parameters()]


if __name__ == "__main__":
    folder, ranks, steps, pause = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    found = quintnet.launch(train, ranks, (folder, steps, pause), fewest=1)
    torch.save(next(one for one in found if one is not None), Path(folder) / f"weights{os.environ['RANK']}")
