"""A run that a scheduler may end at any time, and starts again: as a function of a rank, and as a script."""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import quintnet

ROWS, EPOCHS = 40, 3  # 5 steps in an epoch


class Rows(Dataset[Any]):
    """Each row takes ``pause`` seconds to read."""

    def __init__(self, pause: float) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x, self.pause = torch.randn(ROWS, 12, generator=generator), pause

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.pause)
        return self.x[index], self.x[index, :3].argmax()


class Going(quintnet.Callback):
    """Says when every rank has made a step: there is a file ``going`` in ``folder``. Until then, some rank may not have
    come to ``fit``, and a signal ends it."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_step(self, trainer: quintnet.Trainer, loss: torch.Tensor) -> None:
        (self.folder / "going").touch()


def train(folder: str, pause: float, workers: int = 0) -> str:
    """Train from the newest checkpoint to the end: what the weights, the optimizer and the validations are then."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.2), nn.GELU(), nn.Linear(16, 3))
    data, sampler = Rows(pause), quintnet.BatchSampler(ROWS, 8, seed=1)
    batch = data.x[:8], data.x[:8, :3].argmax(1)
    mesh = quintnet.Mesh(dp=dist.get_world_size() if dist.is_initialized() else 2)
    program = quintnet.compile(model, mesh, batch, loss_fn=F.cross_entropy, check="off")
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    trainer = quintnet.Trainer(
        program,
        optimizer,
        DataLoader(data, batch_sampler=sampler, num_workers=workers),
        DataLoader(data, batch_size=ROWS),
        scheduler=scheduler,
        epochs=EPOCHS,
        checkpoint_folder=Path(folder, "checkpoints"),
        save_every=4,
        patience=100,
        console=False,
        callbacks=[Going(folder)],
    )
    trainer.fit()
    Path(folder, "fitted").touch()
    digest = hashlib.sha256(f"{trainer.history.step} {trainer.best!r} {trainer.bad}".encode())
    whole = [p.full_tensor().contiguous() for p in program.parameters()]  # type: ignore[attr-defined]
    state = [x for p in program.parameters() for _, x in sorted(optimizer.state[p].items())]
    whole += [x.full_tensor().contiguous() if hasattr(x, "full_tensor") else x for x in state]
    for x in whole:
        digest.update(x.detach().numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    where, seconds, ranks, workers = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    results = quintnet.launch(train, ranks, (where, seconds, workers), grace=60)
    found = next(one for one in results if one is not None)
    Path(where, "digest").write_text(found)
