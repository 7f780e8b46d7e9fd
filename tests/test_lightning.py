"""Lightning's Trainer on a mesh beside the same Trainer on one device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="needs lightning")
ROWS, WIDTH, CLASSES = 24, 8, 5
LAYOUTS: list[dict[str, Any]] = [{"dp": 2}, {"tp": 2}, {"pp": 2}, {"dp": 2, "tp": 2, "zero": 3}]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


def _data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(CLASSES, (ROWS,), generator=generator))


Step = Callable[[Any, Any], Any]  # (the LightningModule, a batch) -> what training_step returns


def _two(module: Any, batch: Any) -> Any:
    loss = module.loss(batch)
    for optimizer in module.optimizers():
        optimizer.zero_grad()
    module.manual_backward(loss)
    first, second = module.optimizers()
    module.clip_gradients(first, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
    first.step()
    second.step()
    for scheduler in module.lr_schedulers():
        scheduler.step()
    return loss


STEPS: dict[str, Step] = {
    "the loss": lambda module, batch: module.loss(batch),
    "a factor": lambda module, batch: 0.1 * module.loss(batch),
    "a dict": lambda module, batch: {"loss": module.loss(batch) * 2, "other": 1},
    "two batches": lambda module, batch: module.loss(batch) + 0.5 * module.loss([batch[0] * 2, batch[1]]) ** 2,
    "one of two": lambda module, batch: (module.loss([batch[0] * 2, batch[1]]), module.loss(batch))[1],
    "two optimizers": _two,
}


def _module(step: str) -> Any:
    import lightning.pytorch as lightning

    class Lit(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model, self.losses = Net().double(), list[float]()
            self.automatic_optimization = step != "two optimizers"

        def loss(self, batch: Any) -> Tensor:
            run = getattr(self.trainer.strategy, "step", None)
            found: Tensor = F.cross_entropy(self.model(batch[0]), batch[1]) if run is None else run(batch)
            return found

        def training_step(self, batch: Any, index: int) -> Any:
            returned = STEPS[step](self, batch)
            self.losses.append(float((returned["loss"] if isinstance(returned, dict) else returned).detach()))
            return returned

        def configure_optimizers(self) -> Any:
            if step != "two optimizers":
                return torch.optim.AdamW(self.model.parameters(), lr=0.01)
            both = [
                torch.optim.AdamW(self.model.a.parameters(), lr=0.01),
                torch.optim.SGD(self.model.b.parameters(), lr=0.1, momentum=0.9),
            ]
            return both, [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in both]

    return Lit()


def _fit(
    step: str,
    layout: dict[str, Any] | None,
    *,
    epochs: int = 2,
    resume: str | None = None,
    folder: str = "",
    **more: Any,
) -> tuple[list[float], dict[str, Tensor]]:
    import lightning.pytorch as lightning

    import quintnet.lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module, data = _module(step), _data()
    if layout is not None:
        axes = {name: size for name, size in layout.items() if name in ("dp", "tp", "pp")}
        options = {name: x for name, x in layout.items() if name not in axes}
        more["strategy"] = quintnet.lightning.MeshStrategy(
            quintnet.Mesh(**axes), data[:4], loss_fn=F.cross_entropy, options=options
        )
    callbacks = more.pop("callbacks", lambda: [])()
    if folder:
        callbacks.append(lightning.callbacks.ModelCheckpoint(folder, save_last=True))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, logger=False, enable_checkpointing=bool(folder),
        enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks, **more,
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=4), ckpt_path=resume)
    return module.losses, {name: p.detach().clone() for name, p in module.model.named_parameters()}


def _equal(found: tuple[list[float], dict[str, Tensor]], known: tuple[list[float], dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(known[0][-len(found[0]) :], rel=1e-9)
    for name, x in known[1].items():
        torch.testing.assert_close(found[1][name], x, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("step", STEPS)
def test_what_training_step_returns_is_differentiated(step: str) -> None:
    _equal(_fit(step, {"dp": 2}), _fit(step, None))


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts(layout: dict[str, Any]) -> None:
    _equal(_fit("two batches", layout), _fit("two batches", None))


def _schedule() -> list[Any]:
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    return [GradientAccumulationScheduler({0: 1, 1: 4})]


@pytest.mark.parametrize(
    "more",
    [
        {"accumulate_grad_batches": 4},
        {"callbacks": _schedule},
        {"gradient_clip_val": 0.05},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ],
    ids=["accumulated", "accumulated by a schedule", "clipped", "clipped by value"],
)
def test_arguments_of_the_trainer(more: dict[str, Any]) -> None:
    _equal(_fit("the loss", {"dp": 2}, **more), _fit("the loss", None, **more))


@pytest.mark.parametrize("step", ["the loss", "two optimizers"])
def test_every_optimizer_and_scheduler_is_restored(step: str, tmp_path: Path) -> None:
    known = _fit(step, None, epochs=3)
    _fit(step, {"dp": 2}, epochs=1, folder=str(tmp_path))
    _equal(_fit(step, {"tp": 2}, epochs=3, folder=str(tmp_path), resume=str(tmp_path / "last.ckpt")), known)
