"""Lightning's Trainer on a mesh: what differs from a run on one device is marked.

python examples/loops/lightning_loop.py --mesh pp=2 --out runs/lightning --epochs 1
python examples/loops/lightning_loop.py --mesh tp=2 --out runs/lightning --epochs 2   # goes on, on another layout
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from small import Texts, language_model, main
from torch import Tensor
from torch.utils.data import DataLoader

import quintnet
import quintnet.lightning  # 1


class Language(lightning.LightningModule):  # type: ignore[misc]
    """A language model. ``losses``: of the training steps so far."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.losses = language_model(), list[float]()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        strategy = self.trainer.strategy
        if isinstance(strategy, quintnet.lightning.MeshStrategy):  # 2
            return strategy.step(batch)
        found: Tensor = self.model(**batch).loss
        return found

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss, batch_size=len(batch["input_ids"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]


def run(mesh: quintnet.Mesh | None, out: str, epochs: int) -> tuple[list[float], float]:
    """The losses of the training steps that were run, and that of the evaluation after them."""
    data, held = DataLoader(Texts(24), batch_size=4), DataLoader(Texts(10, seed=1), batch_size=4)
    strategy: Any = "auto" if mesh is None else quintnet.lightning.MeshStrategy(mesh, next(iter(data)))  # 3
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=strategy,  # 4
        max_epochs=epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        default_root_dir=out,
        callbacks=[ModelCheckpoint(dirpath=out, save_last=True)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model, last = Language(), Path(out) / "last.ckpt"
    trainer.fit(model, data, held, ckpt_path=str(last) if last.exists() else None)
    return model.losses, float(trainer.callback_metrics["val_loss"])


if __name__ == "__main__":
    main(__doc__, run, out="runs/lightning", epochs=2)
