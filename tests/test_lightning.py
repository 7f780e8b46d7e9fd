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


def _inputs(module: Any, batch: Any) -> Any:
    """Differentiate with respect to some parameters, by hooks of which one is not linear."""
    optimizer, weight = module.optimizers(), module.model.a.weight
    loss = 3 * module.loss(batch)
    optimizer.zero_grad()
    hook = weight.register_hook(lambda gradient: gradient.clamp(-1e-2, 1e-2))
    module.manual_backward(loss, inputs=[weight])
    hook.remove()
    (module.model.b.bias.grad,) = torch.autograd.grad(module.loss(batch), [module.model.b.bias])
    optimizer.step()
    return loss


STEPS: dict[str, Step] = {
    "the loss": lambda module, batch: module.loss(batch),
    "a factor": lambda module, batch: 0.1 * module.loss(batch),
    "a dict": lambda module, batch: {"loss": module.loss(batch) * 2, "other": 1},
    "two batches": lambda module, batch: module.loss(batch) + 0.5 * module.loss([batch[0] * 2, batch[1]]) ** 2,
    "one of two": lambda module, batch: (module.loss([batch[0] * 2, batch[1]]), module.loss(batch))[1],
    "two optimizers": _two,
    "some parameters": _inputs,
}


def _module(step: str) -> Any:
    import lightning.pytorch as lightning

    class Lit(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model, self.losses, self.rate = Net().double(), list[float](), 0.01
            self.automatic_optimization = step not in ("two optimizers", "some parameters")

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
                trained = [p for p in self.model.parameters() if p.requires_grad]
                return torch.optim.AdamW(trained, lr=self.rate)
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
        accelerator="cpu", devices=1, max_epochs=epochs, logger=False,
        enable_checkpointing=more.pop("enable_checkpointing", bool(folder)), enable_progress_bar=False,
        enable_model_summary=False, callbacks=callbacks, **more,
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


@pytest.mark.parametrize(("before", "after"), [({"dp": 2}, {"tp": 2}), ({"tp": 2}, {"pp": 2})])
def test_a_run_goes_on_in_an_epoch(before: dict[str, Any], after: dict[str, Any], tmp_path: Path) -> None:
    """As Lightning does on one device."""

    def resumed(name: str, first: dict[str, Any] | None, second: dict[str, Any] | None) -> Any:
        from lightning.pytorch.callbacks import ModelCheckpoint

        folder = tmp_path / name
        kept = lambda: [ModelCheckpoint(str(folder), every_n_train_steps=4, save_top_k=-1, filename="{step}")]  # noqa: E731
        _fit("the loss", first, epochs=1, callbacks=kept, enable_checkpointing=True)
        return _fit("the loss", second, resume=str(folder / "step=4.ckpt"))

    _equal(resumed("ours", before, after), resumed("plain", None, None))


@pytest.mark.parametrize("step", ["the loss", "two optimizers"])
def test_every_optimizer_and_scheduler_is_restored(step: str, tmp_path: Path) -> None:
    known = _fit(step, None, epochs=3)
    _fit(step, {"dp": 2}, epochs=1, folder=str(tmp_path))
    _equal(_fit(step, {"tp": 2}, epochs=3, folder=str(tmp_path), resume=str(tmp_path / "last.ckpt")), known)


def test_a_save_that_ends_half_way_is_not_mixed_with_the_one_before(tmp_path: Path) -> None:
    """The Trainer's state is written after the program: a run goes on from the step that both are of."""
    import lightning.pytorch as lightning

    path = tmp_path / "last.ckpt"
    seen: dict[str, Any] = {}

    class Saves(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 2:
                trainer.save_checkpoint(path)
                trainer.save_checkpoint(path)
                seen["kept"] = sorted(path.glob("program/step-*"))
            if trainer.global_step == 4:
                trainer.strategy.checkpoint_io.save_checkpoint = self.fail
                trainer.save_checkpoint(path)

        def fail(self, *_: Any, **__: Any) -> None:
            raise OSError("the disk is gone")

    class Looks(lightning.Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            steps = {int(state["step"]) for state in trainer.optimizers[0].state.values()}
            seen["resumed"] = trainer.global_step, steps

    with pytest.raises(OSError, match="the disk is gone"):
        _fit("the loss", {"tp": 2}, callbacks=lambda: [Saves()])
    _fit("the loss", {"dp": 2}, callbacks=lambda: [Looks()], resume=str(path))
    assert seen == {"kept": [path / "program" / "step-00000002"], "resumed": (2, {2})}


def _layer_by_layer() -> list[Any]:
    from lightning.pytorch.callbacks import BaseFinetuning

    class LayerByLayer(BaseFinetuning):  # type: ignore[misc]
        def freeze_before_training(self, module: Any) -> None:
            self.freeze(module.model.a)

        def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(module.model.a, optimizer, lr=0.02)

    return [LayerByLayer()]


def test_callbacks_are_restored_before_a_fit_begins(tmp_path: Path) -> None:
    """As Lightning does on one device: one that adds groups to the optimizer adds those of the checkpoint then."""

    def resumed(name: str, layout: dict[str, Any] | None) -> Any:
        more: dict[str, Any] = {"folder": str(tmp_path / name), "callbacks": _layer_by_layer}
        _fit("the loss", layout, epochs=2, **more)
        return _fit("the loss", layout, epochs=3, resume=str(tmp_path / name / "last.ckpt"), **more)

    _equal(resumed("ours", {"dp": 2}), resumed("plain", None))


def test_a_search_of_a_rate_leaves_no_state_in_the_optimizer(tmp_path: Path) -> None:
    def search() -> list[Any]:
        from lightning.pytorch.callbacks import LearningRateFinder

        return [LearningRateFinder(num_training_steps=4, attr_name="rate")]

    more: dict[str, Any] = {"callbacks": search, "default_root_dir": str(tmp_path), "enable_checkpointing": True}
    _equal(_fit("the loss", {"dp": 2}, **more), _fit("the loss", None, **more))


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_a_precision_of_the_trainer_is_refused(precision: str) -> None:
    """Lightning ignores it beside a strategy that clips gradients by a plugin of its own."""
    import quintnet

    with pytest.raises(quintnet.CompileError, match=f"QN108[\\s\\S]*{precision}[\\s\\S]*options="):
        _fit("the loss", {"dp": 2}, precision=precision)


def test_each_module_is_evaluated_with_its_own_values() -> None:
    """A Trainer, and a strategy with it, may get several modules."""
    import lightning.pytorch as lightning

    import quintnet.lightning

    def losses(strategy: Any) -> list[float]:
        trainer = lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, **({"strategy": strategy} if strategy else {}),
        )  # fmt: skip
        first, second = _with_validation(), _with_validation()
        second.model.b.weight.data.mul_(3)
        loader = DataLoader(_rows(12, 0), batch_size=4)
        trainer.fit(first, loader)
        for module in (second, first):
            trainer.validate(module, loader, verbose=False)
        second.model = Net().double()
        trainer.validate(second, loader, verbose=False)
        return [numbers["loss"] for module in (first, second) for numbers in module.numbers]

    strategy = quintnet.lightning.MeshStrategy(quintnet.Mesh(tp=2), _rows(12, 0)[:4], loss_fn=F.cross_entropy)
    assert losses(strategy) == pytest.approx(losses(None), rel=1e-9)


# -- everything around a step


IGNORED = -100


def _rows(rows: int, seed: int) -> TensorDataset:
    """Some labels do not count: more of them in the first rows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    return TensorDataset(x, torch.where(torch.arange(rows) % 5 < 2 - torch.arange(rows) // 8, IGNORED, labels))


def _with_validation() -> Any:
    import lightning.pytorch as lightning

    class Validated(lightning.LightningModule):  # type: ignore[misc]
        """Sums losses and two metrics over the labels that count, in batches of unequal sizes."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.model, self.numbers, self.sums = Net().double(), list[dict[str, float]](), [0.0] * 4

        def training_step(self, batch: Any, index: int) -> Tensor:
            run = getattr(self.trainer.strategy, "step", None)
            loss: Tensor = F.cross_entropy(self.model(batch[0]), batch[1]) if run is None else run(batch)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            x, labels = batch
            program = getattr(self.trainer.strategy, "program", None)
            logits = self.model(x) if program is None else program(x)
            counted = labels != IGNORED
            among = (logits.topk(2, -1).indices == labels[:, None]).any(-1)
            numbers = (
                F.cross_entropy(logits, labels, reduction="sum"),
                (logits.argmax(-1) == labels)[counted].sum(),
                among[counted].sum(),
                counted.sum(),
            )
            self.sums = [total + float(number) for total, number in zip(self.sums, numbers, strict=True)]

        def on_validation_epoch_end(self) -> None:
            *totals, count = self.sums
            if count:
                means = {name: x / count for name, x in zip(("loss", "accuracy", "second"), totals, strict=True)}
                self.log_dict({f"val_{name}": torch.tensor(x) for name, x in means.items()})
                self.numbers.append(means)
            self.sums = [0.0] * 4

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    return Validated()


def _around(layout: dict[str, Any] | None, folder: Path, accumulate: int) -> tuple[Any, Any]:
    """The module and the Trainer of a run that has validated, stopped early, kept the best and an average."""
    import lightning.pytorch as lightning
    from lightning.pytorch import callbacks

    import quintnet.lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    module, data, more = _with_validation(), _rows(ROWS, 0), {}
    if layout is not None:
        options = {name: x for name, x in layout.items() if name not in ("dp", "tp", "pp")}
        mesh = quintnet.Mesh(**{name: size for name, size in layout.items() if name not in options})
        more["strategy"] = quintnet.lightning.MeshStrategy(mesh, data[:8], loss_fn=F.cross_entropy, options=options)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=8, logger=False, enable_progress_bar=False, num_sanity_val_steps=0,
        enable_model_summary=False, accumulate_grad_batches=accumulate, **more,
        callbacks=[
            callbacks.ModelCheckpoint(str(folder), "best", monitor="val_loss"),
            callbacks.EarlyStopping("val_loss", patience=2),
            callbacks.EMAWeightAveraging(decay=0.8, update_every_n_steps=1),
        ],
    )  # fmt: skip
    trainer.fit(module, DataLoader(data, batch_size=8), DataLoader(_rows(13, 1), batch_size=5))
    return module, trainer


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_everything_around_a_step(layout: dict[str, Any], accumulate: int, tmp_path: Path) -> None:
    known, plain = _around(None, tmp_path / "plain", accumulate)
    module, trainer = _around(layout, tmp_path / "ours", accumulate)
    assert trainer.current_epoch == plain.current_epoch and len(known.numbers) > 2
    for numbers, expected in zip(module.numbers, known.numbers, strict=True):
        assert numbers == pytest.approx(expected, rel=1e-9)
    assert trainer.checkpoint_callback.best_model_score == pytest.approx(plain.checkpoint_callback.best_model_score)
    for (name, p), q in zip(module.named_parameters(), known.parameters(), strict=True):
        torch.testing.assert_close(getattr(p, "full_tensor", lambda p=p: p)(), q, rtol=1e-9, atol=1e-12, msg=name)
