"""The training loop: what everybody writes around ``program.step``."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..api.compiled_program import CompiledProgram
from ..checkpoint.documents import read_state
from ..checkpoint.manifest import Damaged, available
from ..checkpoint.training_state import require_number
from ..compat.torch import pytree
from ..core.errors import CheckpointError, CheckpointWarning
from ..ir.batch_form import batch_size_of, plain_batch
from ..runtime.launch.preemption import SIGNALS
from .batches import BatchSampler
from .buckets import pad_to_bucket
from .measures import Metric, device_flops, memory_gib
from .records import ConsoleRecord, JsonRecord, Record, TensorBoardRecord
from .validation import validate


@dataclass
class History:
    """What a run did: the ``losses`` of the steps that this call took, and (step, metrics) of each of its
    ``validations``."""

    step: int = 0
    losses: list[float] = field(default_factory=list)
    validations: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)
    resumed_from: int | None = None
    stopped_early: bool = False


@dataclass
class Trainer:
    """Trains a compiled program.

    Every rank makes one with the same arguments, and calls ``fit``. Only rank 0 prints and writes logs.

    Args:
        program: the compiled program.
        optimizer: of ``program.parameters()``.
        train_loader: gives global batches. A DataLoader with a :class:`BatchSampler` resumes at the sample where a run
            was interrupted; others are read again up to there.
        val_loader: read once for each validation; a last batch of any size is fine.
        scheduler: of the learning rate, stepped after each optimizer step.
        epochs: passes over the data after which ``fit`` ends.
        max_steps: steps after which ``fit`` ends, if that is sooner.
        buckets: lengths to which the sequences of training batches are padded, see :func:`pad_to_bucket`; None: not.
        max_grad_norm: the largest global L2 norm of all gradients; None: no clipping.
        validate_every: steps between validations; None: after every epoch.
        patience: stop after this many validations whose loss was not below the best one; None: never.
        metrics: metrics of the model's outputs in validation, by name.
        perplexity: also report e to the power of the validation loss.
        checkpoint_folder: where to save checkpoints, and to resume from if it has one.
        save_every: steps between checkpoints; None: after every epoch.
        keep: how many of the newest checkpoints to keep.
        preempt_signals: signals by which a scheduler asks the run to end, on any rank, if there is a checkpoint_folder:
            ``fit`` then saves at the end of the step and exits with :data:`quintnet.REQUEUE_EXIT_CODE`, see
            :meth:`CompiledProgram.on_preempt`. Empty: signals stay as they are.
        log_every: steps between two log lines.
        log_folder: for ``metrics.jsonl``.
        tensorboard: also write TensorBoard events into ``log_folder``.
        console: print log lines.
        batch_is_local: training batches have only this data rank's rows.
        measure_step: the step (from 1) whose timeline is written into ``log_folder`` as ``timeline.json``; see
            :meth:`CompiledProgram.measure`.
    """

    program: CompiledProgram
    optimizer: torch.optim.Optimizer
    train_loader: Iterable[Any]
    val_loader: Iterable[Any] | None = None
    _: KW_ONLY
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None
    epochs: int = 1
    max_steps: int | None = None
    buckets: int | Sequence[int] | None = None
    max_grad_norm: float | None = None
    validate_every: int | None = None
    patience: int | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    perplexity: bool = False
    checkpoint_folder: str | Path | None = None
    save_every: int | None = None
    keep: int = 3
    preempt_signals: Sequence[int] = SIGNALS
    log_every: int = 10
    log_folder: str | Path | None = None
    tensorboard: bool = False
    console: bool = True
    batch_is_local: bool = False
    measure_step: int | None = None

    def __post_init__(self) -> None:
        """Raises: CheckpointError: QN603 for a number of checkpoints to keep that cannot be."""
        require_number("keep", self.keep, 1)
        self.history = History()
        self.seen = self.in_epoch = self.epoch = self.bad = 0  # samples in all, batches of this epoch, ...
        self.best = math.inf
        self.kept: list[Tensor] = []
        self.saving: Future[Path] | None = None
        self.saved = -1

    def fit(self) -> History:
        """Train until the end, from the newest checkpoint if there is one; what was done.

        Raises:
            Preempted: if a scheduler asked for it; everything is saved.
            RunError: QN501 on every rank if a loss or gradient is not finite; the last checkpoint is whole.
            CheckpointError: QN601 to QN603, see :meth:`CompiledProgram.load` and ``save``.
            RunError: QN306 if signals are to be handled outside of the main thread.
        """
        records: list[Record] = []
        with self._preemptible(records) as end_of_step:
            self._resume()
            records += self._records()
            try:
                if self.history.resumed_from is not None:
                    self._write(records, "resumed", {})
                while self.epoch < self.epochs and not self._over():
                    for batch in self._batches():
                        self._step(batch, records)
                        if self._over():
                            break
                        end_of_step()
                    else:
                        self._end_of_epoch(records)
                self._save_now()
            finally:
                for record in records:
                    record.close()
        self.history.losses = [float(loss) for loss in self.kept]
        return self.history

    def validate(self) -> dict[str, float]:
        """Mean loss (and metrics) over the validation data."""
        assert self.val_loader is not None, "there is no val_loader"
        found = validate(self.program, self.val_loader, self.metrics)
        if self.perplexity:
            found["perplexity"] = math.exp(min(found["loss"], 700.0))
        return found

    # -- steps

    def _over(self) -> bool:
        return self.history.stopped_early or (self.max_steps is not None and self.history.step >= self.max_steps)

    def _batches(self) -> Iterator[Any]:
        """What is left of this epoch."""
        sampler = self._sampler()
        if sampler is not None:
            if sampler.after(self.seen) // sampler.samples == self.epoch:
                sampler.start_at(self.seen)
                yield from self.train_loader
            return
        for index, batch in enumerate(self.train_loader):
            if index >= self.in_epoch:
                yield batch

    def _sampler(self) -> BatchSampler | None:
        found = getattr(self.train_loader, "batch_sampler", None)
        return found if isinstance(found, BatchSampler) else None

    def _step(self, batch: Any, records: list[Record]) -> None:
        start = time.perf_counter()
        log = self.log_every > 0 and (self.history.step + 1) % self.log_every == 0
        batch = batch if self.buckets is None else pad_to_bucket(batch, self.buckets)
        loss = self._loss(batch)
        norm = None
        if self.max_grad_norm is not None or log:
            norm = self.program.clip_grad_norm(self.max_grad_norm if self.max_grad_norm is not None else math.inf)
        rate = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad()
        rows = batch_size_of(batch) * (self.program.mesh.data_ways if self.batch_is_local else 1)
        self.history.step += 1
        self.in_epoch += 1
        self.seen += rows
        self.kept.append(loss)
        if log:
            assert norm is not None
            numbers = {"loss": float(loss), "grad_norm": float(norm), "lr": float(rate)}
            numbers |= self._speed(batch, rows, loss.device, time.perf_counter() - start)
            self._write(records, "train", numbers)
        if self.validate_every and self.history.step % self.validate_every == 0:
            self._validate(records)
        if self.save_every and self.history.step % self.save_every == 0:
            self._save()

    def _loss(self, batch: Any) -> Tensor:
        if self.history.step + 1 != self.measure_step:
            return self.program.step(batch, batch_is_local=self.batch_is_local)
        loss, timeline = self.program.measure(batch, batch_is_local=self.batch_is_local)
        if self.program.first:
            timeline.save(Path(self.log_folder or ".") / "timeline.json")
        return loss

    def _speed(self, batch: Any, rows: int, device: torch.device, seconds: float) -> dict[str, float]:
        found = {"memory_gib": memory_gib(device)}
        first = next((x for x in pytree.tree_leaves(plain_batch(batch)) if isinstance(x, Tensor)), None)
        if first is not None and first.dim() == 2 and not first.is_floating_point():
            found["tokens_per_second"] = rows * first.shape[1] / seconds
        else:
            found["rows_per_second"] = rows / seconds
        most = device_flops(device, next(self.program.parameters()).dtype)
        if most is not None:
            found["mfu"] = self.program.model_flops / (seconds * most * self.program.mesh.size)
        return found

    def _end_of_epoch(self, records: list[Record]) -> None:
        self.epoch, self.in_epoch = self.epoch + 1, 0
        sampler = self._sampler()
        if sampler is not None:
            self.seen = sampler.after(self.seen)
        if not self.validate_every:
            self._validate(records)
        if not self.save_every:
            self._save()

    def _validate(self, records: list[Record]) -> None:
        if self.val_loader is None:
            return
        found = self.validate()
        self.history.validations.append((self.history.step, found))
        self._write(records, "validation", found)
        self.bad = 0 if found["loss"] < self.best else self.bad + 1
        self.best = min(self.best, found["loss"])
        self.history.stopped_early = self.patience is not None and self.bad >= self.patience

    # -- records and checkpoints

    def _records(self) -> list[Record]:
        if not self.program.first:
            return []
        found: list[Record] = [ConsoleRecord()] if self.console else []
        if self.log_folder is not None:
            found.append(JsonRecord(Path(self.log_folder)))
            if self.tensorboard:
                found.append(TensorBoardRecord(Path(self.log_folder)))
        return found

    def _write(self, records: Iterable[Record], kind: str, numbers: Mapping[str, float]) -> None:
        for record in records:
            record.write(self.history.step, kind, numbers)

    def _preemptible(self, records: list[Record]) -> AbstractContextManager[Callable[[], None]]:
        if self.checkpoint_folder is None or not self.preempt_signals:
            return nullcontext(lambda: None)

        def save() -> None:
            self._write(records, "preempted", {})
            self._save_now()

        return self.program.on_preempt(save, signals=self.preempt_signals)

    def _save_now(self) -> None:
        self._save()
        if self.saving is not None:
            self.saving.result()

    def _save(self) -> None:
        if self.checkpoint_folder is None or self.saved == self.history.step:
            return
        if self.saving is not None:
            self.saving.result()  # what went wrong with the one before is raised here
        at: dict[str, Any] = {"seen": self.seen, "epoch": self.epoch, "in_epoch": self.in_epoch, "bad": self.bad}
        at["best"] = self.best if math.isfinite(self.best) else None
        if self.scheduler is not None:
            at["scheduler"] = self.scheduler.state_dict()
        self.saved = self.history.step
        self.saving = self.program.save_async(
            self.checkpoint_folder, step=self.saved, optimizer=self.optimizer, extra={"trainer": at}, keep=self.keep
        )

    def _resume(self) -> None:
        if self.checkpoint_folder is None or self.history.step or not available(Path(self.checkpoint_folder)):
            return
        _refuse_others(Path(self.checkpoint_folder))
        found = self.program.load(self.checkpoint_folder, optimizer=self.optimizer)
        at = found.extra["trainer"]
        self.seen, self.epoch, self.in_epoch = at["seen"], at["epoch"], at["in_epoch"]
        self.best, self.bad = math.inf if at["best"] is None else at["best"], at["bad"]
        sampler = self._sampler()
        if sampler is not None:
            after = sampler.after(self.seen)
            # a checkpoint of an epoch's last step was written before what is done at the epoch's end
            ends = self.in_epoch > 0 and after // sampler.samples == self.epoch + 1
            if not ends:
                self.seen, self.epoch = after, after // sampler.samples
        if self.scheduler is not None and "scheduler" in at:
            self.scheduler.load_state_dict(at["scheduler"])
        elif self.scheduler is not None:
            message = f"{found.path} has no scheduler's state: this run's scheduler starts at its beginning"
            warnings.warn(CheckpointWarning(message), stacklevel=3)
        self.history.step = self.history.resumed_from = self.saved = found.step


def _refuse_others(folder: Path) -> None:
    """Before anything is loaded.

    Raises:
        CheckpointError: QN602 if the newest checkpoint was not written by a Trainer: where the data stood is not known.
    """
    for entry in available(folder):
        try:
            state = read_state(entry.path)
        except (Damaged, OSError):  # loading says it, and takes the one before
            continue
        if "trainer" not in state["extra"]:
            raise CheckpointError(
                "QN602",
                f"{entry.path} was not written by a Trainer: where the data stood is not known",
                fix="load it with program.load(...), and give the Trainer another checkpoint_folder",
            )
        return
