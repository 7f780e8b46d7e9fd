"""transformers' Trainer (and those that derive from it, such as TRL's SFTTrainer) with a compiled program."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from ..api.compile import compile as compile_program
from ..compat.trainers import prepared, save_random_states
from ..core.errors import CheckpointError
from ..core.mesh import Mesh
from ..ir.containers import model_inputs
from ..ir.plan import Plan
from ..runtime.launch.world import judges, world_size
from .one_process import arguments_of_one_process, as_one_process, first_of
from .refused import refuse_arguments, refuse_changes, refuse_plan
from .together import wait_for_all
from .trainer_loss import COUNT, evaluation_count, smoothed_loss, training_count

FOLDER = "quintnet"  # in checkpoint-N: parameters and optimizer state, in parts
SCHEDULER = "scheduler.pt"


class TrainerMixin:
    """A mixin that trains a Trainer's model on a mesh.

    Example::

        class Trainer(quintnet.hf.TrainerMixin, transformers.Trainer): ...

        trainer = Trainer(model, args, train_dataset=data, mesh=quintnet.Mesh(dp=2, tp=2), options={"zero": 3})
        trainer.train()

    Every rank runs the same loop: all read the same whole batches, of which a program takes this rank's part. A batch
    has ``per_device_train_batch_size`` rows for each data rank (dp, ep), as with other ways to train on several
    devices; ``trainer.args`` has the product. Losses, clipping, accumulation, schedulers, evaluation and callbacks are
    those of the Trainer; rank 0 logs and writes. ``checkpoint-N`` has the weights as ``from_pretrained`` reads them,
    and a folder ``quintnet`` with what resuming needs, on any layout.

    Args:
        mesh: of all processes that a launcher started, or of ranks in this one.
        plan: as of :func:`quintnet.compile`.
        options: its other options: ``{"zero": 3, "backend": "inductor"}``. ``bf16=True`` is ``precision="bf16"``,
            ``gradient_checkpointing=True`` is ``recompute="full"``.

    Raises:
        CompileError: QN108 for arguments that cannot be followed, before anything runs.
        CheckpointError: QN602 when it resumes from what a plain Trainer wrote.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *rest: Any,
        mesh: Mesh,
        plan: Plan | Mapping[str, Any] | str | None = None,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._given = args or TrainingArguments(output_dir="tmp_trainer")
        refuse_arguments(self, self._given, kwargs)
        self._mesh, self._plan, self._options, self._prepared = mesh, plan, dict(options or {}), False
        trained = arguments_of_one_process(self._given, mesh.data_ways)
        super().__init__(model, trained, *rest, **kwargs)  # type: ignore[call-arg]
        self._loss, self._trained = smoothed_loss(self._me), self._me.model
        self.program = compile_program(self._me.model, mesh, loss_fn=self._loss, plan=plan, **self._chosen())
        refuse_plan(self.program._task.plan)

    @property
    def _me(self) -> Any:
        """Return this object as a Trainer."""
        return self

    def _chosen(self) -> dict[str, Any]:
        args, options = self._given, dict(self._options)
        whole = all(p.dtype == torch.float32 for p in self._me.model.parameters() if p.requires_grad)
        if args.bf16 and whole:
            options.setdefault("precision", "bf16")
        if getattr(args, "gradient_checkpointing", False) or getattr(args, "activation_checkpointing", False):
            options.setdefault("recompute", "full")
        if world_size() == 1:  # else a program is where its process group is
            options.setdefault("device", args.device)
        return options

    def _prepare(self, batch: Any) -> None:
        """Compile for batches like this one; the model's parameters become this rank's parts."""
        if not self._prepared:
            self.program.prepare(batch)
            list(self.program.parameters())
            self._prepared = True

    # -- methods about processes that a Trainer calls

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        as_one_process(self._me.accelerator)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Do nothing: the program moves its parts."""

    def _wrap_model(self, model: nn.Module, *_: Any, **__: Any) -> nn.Module:
        return model

    # -- training

    def train(self, *args: Any, **kwargs: Any) -> Any:
        refuse_changes(self, self._trained, self._loss)
        if world_size() > 1:  # an optimizer is made of this rank's parts; in one process, of the parameters themselves
            self._prepare_for_first()
        return super().train(*args, **kwargs)  # type: ignore[misc]

    def _prepare_for_first(self) -> None:
        """Compile for batches like the first one, which is read once more later."""
        me = self._me
        batch = prepared(me, first_of(me.get_train_dataloader()))
        if me.model_accepts_loss_kwargs and "labels" in batch:
            batch[COUNT] = torch.ones((), device=batch["labels"].device)
        me.model.train()
        self._prepare(batch)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        of_other_stages = [p for p in self._me.model.parameters() if p.is_meta and p.requires_grad]
        for p in of_other_stages:
            p.requires_grad_(False)
        try:
            optimizer: torch.optim.Optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]
        finally:
            for p in of_other_stages:
                p.requires_grad_(True)
        return optimizer

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None, *_: Any) -> Tensor:
        me = self._me
        refuse_changes(self, self._trained, self._loss)
        model.train()
        train = getattr(me.optimizer, "train", None)
        if callable(train):
            train()
        batch, counted = prepared(me, inputs), me.model_accepts_loss_kwargs and num_items_in_batch is not None
        if counted:
            batch[COUNT] = training_count(me, num_items_in_batch)
        self._prepare(batch)
        loss = self.program.step(batch).detach().as_subclass(Tensor).to(me.args.device)  # where the Trainer sums it
        scaled_flag: bool | None = getattr(me, "loss_is_scaled_for_ga", None)  # transformers 5.17 has no such attribute
        scaled = counted if scaled_flag is None else scaled_flag
        parts: int = me.current_gradient_accumulation_steps
        if scaled or parts == 1:
            return loss
        if me.accelerator.sync_gradients:
            with torch.no_grad():
                for p in self.program.parameters():
                    if p.grad is not None:
                        p.grad.div_(parts)
        return loss / parts

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self.program.clip_grad_norm(self._me.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self.program.clip_grad_norm(float("inf")) if grad_norm is None else grad_norm

    # -- evaluation

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        me = self._me
        refuse_changes(self, self._trained, self._loss)
        batch = prepared(me, inputs)
        names = me.label_names
        labelled = bool(names) and all(batch.get(name) is not None for name in names)
        alone = not names and (batch.get("return_loss") or me.can_return_loss)
        has_loss = labelled or alone
        loss: Any = None
        if has_loss:
            count = evaluation_count(me, batch)
            if count is not None:
                batch[COUNT] = count
            self._prepare(batch)
            if prediction_loss_only or self._loss is not None:
                loss = self.program.evaluate(batch).detach().to(me.args.device)
            if prediction_loss_only:
                return loss, None, None
        outputs = _by_name(self.program(**model_inputs(batch, self._loss)), has_loss)
        if loss is None and has_loss:
            loss = outputs.get("loss")
        if prediction_loss_only:
            return loss, None, None
        ignored = ignore_keys
        if ignored is None:
            ignored = getattr(getattr(me.model, "config", None), "keys_to_ignore_at_inference", ["past_key_values"])
        dropped = {*ignored, "loss"} if has_loss else {*ignored}
        logits = tuple(x for name, x in outputs.items() if name not in dropped)
        labels = tuple(batch[name] for name in names) if labelled else None
        return loss, _single(logits), labels and _single(labels)

    # -- checkpoints

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        me = self._me
        folder = Path(output_dir or me.args.output_dir)
        part = folder.parent / f".{folder.name}.quintnet"
        if judges():
            shutil.rmtree(part, ignore_errors=True)
        if self._prepared:
            self.program.save_pretrained(part)
        elif judges():
            me.model.save_pretrained(part)
        if judges():
            self._move(part, folder)
        wait_for_all()  # ranks test whether the folder exists, to agree on the best one

    def _move(self, part: Path, folder: Path) -> None:
        """Move the files of ``part`` into ``folder``, on rank 0, next to those of the Trainer."""
        me = self._me
        folder.mkdir(parents=True, exist_ok=True)
        for file in part.iterdir():
            if (folder / file.name).is_dir():
                shutil.rmtree(folder / file.name)
            os.replace(file, folder / file.name)
        part.rmdir()
        processing = me.processing_class or getattr(me.data_collator, "tokenizer", None)
        if processing is not None:
            processing.save_pretrained(folder)
        torch.save(self._given, folder / "training_args.bin")

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]
        wait_for_all("the end of a checkpoint")  # rank 0 has removed old ones

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        me = self._me
        self.program.save(Path(output_dir) / FOLDER, step=me.state.global_step, optimizer=_plain(me.optimizer))
        if judges():
            torch.save(me.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save random states on rank 0: all ranks draw the same numbers."""
        if judges():
            save_random_states(self._me, output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if not Path(resume_from_checkpoint).is_dir():
            raise CheckpointError("QN602", f"there is no folder {resume_from_checkpoint}")
        if not (Path(resume_from_checkpoint) / FOLDER).is_dir():
            raise CheckpointError(
                "QN602",
                f"{resume_from_checkpoint} has no folder {FOLDER!r}: a plain Trainer wrote it, or save_only_model=True",
                fix="start from its weights, by from_pretrained, and train without resume_from_checkpoint",
            )
        if not self._prepared:
            self._prepare_for_first()
        self.program.load(Path(resume_from_checkpoint) / FOLDER)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        me = self._me
        self.program.load(Path(checkpoint) / FOLDER, optimizer=_plain(me.optimizer))
        me.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER, weights_only=True))

    def _load_best_model(self) -> None:
        best = Path(self._me.state.best_model_checkpoint)
        if (best / FOLDER).is_dir():
            self.program.load(best / FOLDER)
        else:
            self.program.load_pretrained(best)


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """Return an optimizer without accelerate's wrapper."""
    unwrapped: torch.optim.Optimizer = getattr(optimizer, "optimizer", optimizer)
    return unwrapped


def _by_name(outputs: Any, has_loss: bool) -> dict[str, Any]:
    """Return the outputs of a model by name. Outputs of a tuple are numbered, after a loss if there is one."""
    if isinstance(outputs, dict):
        return outputs
    numbered = dict(enumerate(outputs)) if has_loss else {1: outputs}
    return {"loss" if number == 0 else str(number): x for number, x in numbered.items()}


def _single(items: tuple[Any, ...]) -> Any:
    return items[0] if len(items) == 1 else items
