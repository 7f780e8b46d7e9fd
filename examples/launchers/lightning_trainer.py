"""Lightning's Trainer runs the loop, and the program each step: ``python lightning_trainer.py 2``."""

from __future__ import annotations

import sys
from typing import Any

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader
from training import model_and_batch

import quintnet


class Split(DDPStrategy):
    """Processes and a process group, as DDP has them; the program has the model, and DDP does not wrap it."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return model


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False  # step is forward and backward
        self.model, self.batch = model_and_batch()

    def setup(self, stage: str) -> None:
        mesh = quintnet.Mesh(dp=self.trainer.world_size)
        self.program = quintnet.compile(self.model, mesh, self.batch, loss_fn=F.mse_loss)

    def training_step(self, batch: tuple[Tensor, Tensor], number: int) -> None:
        loss, optimizer = self.program.step(batch), self.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        self.log("loss", loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.program.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return DataLoader([self.batch] * 20, batch_size=None)


if __name__ == "__main__":
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=int(sys.argv[1]),
        strategy=Split(),
        max_epochs=1,
        use_distributed_sampler=False,  # each rank takes its rows of the global batch
        enable_checkpointing=False,  # program.save writes checkpoints
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Regression())
    if trainer.is_global_zero:
        print(f"loss {float(trainer.callback_metrics['loss']):.6f}")
