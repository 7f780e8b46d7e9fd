"""The training loop around ``program.step``."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..api.compiled_program import CompiledProgram
from ..checkpoint.stores.places import folder_at
from ..checkpoint.training_state import Restored, require_number
from ..core.errors import CheckpointError, CheckpointWarning, QuintNetError, RunError
from ..core.files import AnyPath, path_of
from ..ir.batch_form import batch_size_of
from ..runtime.launch.accelerator import group_accelerator
from ..runtime.launch.consistency import tell
from ..runtime.launch.heartbeat import current
from ..runtime.launch.preemption import SIGNALS, Preempted
from ..runtime.launch.world import judges, many
from ..weights.files import shown
from .buckets import PaddedBatches
from .callbacks import Callback
from .loggers import ConsoleLogger, JsonLogger, Logger, TensorBoardLogger, write_log_file
from .measures import Metric, step_speed
from .resume.last_run import goes_on
from .resume.resumable_loader import ResumableLoader
from .resume.stored_checks import require_trainer_state
from .resume.stored_scheduler import StoredScheduler
from .save_interval import SaveInterval
from .schedulers import follows_validation, require_steps
from .time_report import RunTime, Stopwatch
from .validation import LossWeight, require_validation, validate


@dataclass
class History:
    """The record of a run: the ``losses`` of this call's steps, and (step, metrics) of each of its ``validations``."""

    step: int = 0
    losses: list[float] = field(default_factory=list)
    validations: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)
    resumed_from: int | None = None
    stopped_early: bool = False


_NOTHING = object()


@dataclass
class Trainer:
    """Trains a compiled program.

    Every rank makes one with the same arguments, and calls ``fit``. Only rank 0 prints and writes logs.

    Args:
        program: the compiled program.
        optimizer: of ``program.parameters()``.
        train_loader: gives global batches. A run that goes on reads what is left of its epoch, see
            :class:`ResumableLoader`.
        val_loader: read once for each validation; a last batch of any size is fine.
        scheduler: of the learning rate, stepped after each optimizer step; a ReduceLROnPlateau after each validation,
            with its loss.
        epochs: passes over the data after which ``fit`` ends.
        max_steps: steps after which ``fit`` ends, if that is sooner.
        buckets: lengths to which the sequences of training batches are padded, see :func:`pad_to_bucket`; None: not.
            The first batch that is padded is evaluated both ways.
        bucket_values: what sequences are padded with, as ``values`` of :func:`pad_to_bucket`.
        max_grad_norm: the largest global L2 norm of all gradients; None: no clipping.
        validate_every: steps between validations; None: after every epoch.
        patience: stop after this many validations whose loss was not below the best one; None: never.
        metrics: metrics of the model's outputs in validation, by name.
        loss_weight: how much the loss of a validation batch counts: ``lambda batch: ...``. None: the loss is that of
            all batches as if they were one, see :meth:`CompiledProgram.evaluate_together`.
        perplexity: also report e to the power of the validation loss.
        checkpoint_folder: where to save checkpoints, and to resume from if it has one.
        save_every: steps between checkpoints; None: after every epoch; ``"auto"``: as many as lose the least time to
            saves and faults, by what steps and saves of this run take.
        mean_time_between_failures: for ``"auto"``: seconds, of the whole run (that of a node / nodes).
        keep: how many of the newest checkpoints to keep.
        preempt_signals: signals by which a scheduler asks the run to end, on any rank, if there is a checkpoint_folder:
            ``fit`` then saves at the end of the step and exits with :data:`quintnet.REQUEUE_EXIT_CODE`, see
            :meth:`CompiledProgram.on_preempt`. Empty: signals stay as they are.
        log_every: steps between two log lines.
        log_folder: for ``metrics.jsonl``, and ``time.json``, which is else in the checkpoint_folder: where the time of
            all starts of the run went (``quintnet goodput FOLDER``).
        tensorboard: also write TensorBoard events into ``log_folder``.
        console: print log lines, and where the time went.
        callbacks: called while the run goes on, see :class:`Callback`; after the loggers that keywords above ask for.
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
    bucket_values: Mapping[Any, float | None] | None = None
    max_grad_norm: float | None = None
    validate_every: int | None = None
    patience: int | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    loss_weight: LossWeight | None = None
    perplexity: bool = False
    checkpoint_folder: AnyPath | None = None
    save_every: int | Literal["auto"] | None = None
    mean_time_between_failures: float | None = None
    keep: int = 3
    preempt_signals: Sequence[int] = SIGNALS
    log_every: int = 10
    log_folder: AnyPath | None = None
    tensorboard: bool = False
    console: bool = True
    callbacks: Sequence[Callback] = ()
    batch_is_local: bool = False
    measure_step: int | None = None

    def __post_init__(self) -> None:
        """Check the arguments.

        Raises:
            CheckpointError: QN603 for a number of checkpoints to keep, or a scheduler's state, that cannot be.
            CompileError: QN108 for ``save_every="auto"`` without the mean time between failures, or a scheduler that
                needs more than there is.
            RunError: QN301 for a ``measure_step`` where several ranks share this process.
        """
        require_number("keep", self.keep, 1)
        require_steps(self.scheduler, validation=self.val_loader is not None)
        self._stored: StoredScheduler | None = None
        self._stored_scheduler()  # what cannot be saved is refused now
        if self.measure_step is not None:
            self.program.require_measure()
        self.interval = SaveInterval(self.save_every, self.mean_time_between_failures, self._everybody)
        self.watch, self.all_callbacks = Stopwatch(None, lambda: 0.0), list[Callback]()
        self.history = History()
        self.padded: PaddedBatches | None = None
        if self.buckets is not None:
            self.padded = PaddedBatches(self.program, self.buckets, self.bucket_values, self.batch_is_local)
        self.data = ResumableLoader(self.train_loader, self.program, batch_is_local=self.batch_is_local)
        self.data.keeps_states = self.checkpoint_folder is not None and current.get() is not None
        self.bad = 0  # validations in a row
        self.best = math.inf
        self.kept: list[Tensor] = []
        self.saving: Future[Path | str] | None = None
        self.saved = -1

    def fit(self) -> History:
        """Train until the end, from the newest checkpoint if there is one, and return what was done.

        Raises:
            Preempted: if a scheduler asked for it; everything is saved.
            RunError: QN501 on every rank if a loss or gradient is not finite; the last checkpoint is whole. QN306 if
                signals are to be handled outside of the main thread.
            CheckpointError: QN601 to QN603, see :meth:`CompiledProgram.load` and ``save``.
            CompileError: QN108 before the first step, if there is no validation loss for batches like these.
        """
        self.watch, self.all_callbacks = self._stopwatch(), [*self._loggers(), *self.callbacks]
        if self.val_loader is not None:
            require_validation(self.program, self.metrics, self.loss_weight)
        with self._preemptible() as end_of_step:
            try:
                with self.watch.on("restart"):
                    self._resume()
                self.optimizer.zero_grad()  # a run that failed may have left gradients
                self.watch.begin(self.history.step)
                self.interval.begin(self.history.step)
                self._tell("on_start")
                while self.data.epoch < self.epochs and not self._over():
                    for batch in self._timed(iter(self.data)):
                        self._step(batch)
                        if self._over():
                            break
                        end_of_step()
                    else:
                        self._end_of_epoch()
                self._save_now()
                self.watch.end("finished")
            except Preempted:
                self.watch.end("preempted")
                raise
            except BaseException:
                self.watch.end("failed")
                raise
            finally:
                self._tell("on_end")
        self.history.losses = [float(loss) for loss in self.kept]
        return self.history

    @property
    def time(self) -> RunTime:
        """Return where the time of this run went, over all its starts; on the first rank, which keeps the file."""
        return self.watch.run

    def validate(self) -> dict[str, float]:
        """Return loss and metrics of the validation data, see :func:`.validation.validate`."""
        assert self.val_loader is not None, "there is no val_loader"
        numbers = validate(self.program, self.val_loader, self.metrics, self.loss_weight)
        if self.perplexity:
            numbers["perplexity"] = math.exp(min(numbers["loss"], 700.0))
        return numbers

    # -- steps

    def _over(self) -> bool:
        return self.history.stopped_early or (self.max_steps is not None and self.history.step >= self.max_steps)

    def _step(self, batch: Any) -> None:
        start, compiled = time.perf_counter(), self.program.seconds_compiling
        with self.watch.on("step"):
            loss, numbers = self._train(batch, start)
        compiling = self.program.seconds_compiling - compiled
        self.watch.step(self.history.step)
        if self.saving is not None and self.saving.done():
            self.saving.result()  # raise its error now, and not at the next save
        due = self.interval.due(self.history.step, time.perf_counter() - start - compiling)
        with self.watch.on("other"):
            self._tell("on_step", loss)
            if numbers is not None:
                self._tell("on_log", numbers)
        if self.validate_every and self.history.step % self.validate_every == 0:
            self._validate()
        if due:
            self._save()

    def _train(self, batch: Any, start: float) -> tuple[Tensor, dict[str, float] | None]:
        """Train on a batch; return the loss, and numbers to log, if any."""
        log = self.log_every > 0 and (self.history.step + 1) % self.log_every == 0
        batch = batch if self.padded is None else self.padded(batch)
        try:
            loss = self._loss(batch)
        except RunError:
            self._rescue()
            raise
        norm = None
        if self.max_grad_norm is not None or log:
            norm = self.program.clip_grad_norm(self.max_grad_norm if self.max_grad_norm is not None else math.inf)
        rate = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        if self.scheduler is not None and not follows_validation(self.scheduler):
            self.scheduler.step()
        self.optimizer.zero_grad()
        rows = batch_size_of(batch) * (self.program.mesh.data_ways if self.batch_is_local else 1)
        self.history.step += 1
        self.kept.append(loss)
        if not log:
            return loss, None
        assert norm is not None
        numbers = {"loss": float(loss), "grad_norm": float(norm), "lr": float(rate)}
        return loss, numbers | step_speed(self.program, batch, rows, loss.device, time.perf_counter() - start)

    def _loss(self, batch: Any) -> Tensor:
        if self.history.step + 1 != self.measure_step:
            return self.program.step(batch, batch_is_local=self.batch_is_local)
        loss, timeline = self.program.measure(batch, batch_is_local=self.batch_is_local)
        if self.program.first:
            write_log_file(path_of(self.log_folder or ".", "QN701") / "timeline.json", f"{timeline.to_json()}\n")
        return loss

    def _end_of_epoch(self) -> None:
        if not self.validate_every:
            self._validate()
        if not self.save_every:
            self._save()

    def _validate(self) -> None:
        if self.val_loader is None:
            return
        with self.watch.on("validation"):
            numbers = self.validate()
        self.history.validations.append((self.history.step, numbers))
        if follows_validation(self.scheduler):
            self.scheduler.step(numbers["loss"])  # type: ignore[union-attr, arg-type]
        self._tell("on_validation", numbers)
        self.bad = 0 if numbers["loss"] < self.best else self.bad + 1
        self.best = min(self.best, numbers["loss"])
        self.history.stopped_early = self.patience is not None and self.bad >= self.patience

    # -- callbacks and checkpoints

    def _loggers(self) -> list[Callback]:
        loggers: list[Callback] = [ConsoleLogger()] if self.console else []
        if self.log_folder is not None:
            loggers.append(JsonLogger(self.log_folder))
            if self.tensorboard:
                loggers.append(TensorBoardLogger(self.log_folder))
        return loggers

    def _tell(self, method: str, *args: Any) -> None:
        for callback in self.all_callbacks:
            try:
                getattr(callback, method)(self, *args)
            except Exception as error:
                if isinstance(error, QuintNetError) or not isinstance(callback, Logger):
                    raise
                callback.fail(error)

    def _stopwatch(self) -> Stopwatch:
        saves = None if self.checkpoint_folder is None else folder_at(self.checkpoint_folder).path
        folder = self.log_folder if self.log_folder is not None or isinstance(saves, str) else saves  # not in a store
        own_folder = path_of(folder, "QN701") if folder is not None and judges() else None
        return Stopwatch(own_folder, lambda: self.program.seconds_compiling)

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            with self.watch.on("data"):
                batch = next(batches, _NOTHING)
            if batch is _NOTHING:
                return
            yield batch

    def _preemptible(self) -> AbstractContextManager[Callable[[], None]]:
        if self.checkpoint_folder is None or not self.preempt_signals:
            return nullcontext(lambda: None)

        def save() -> None:
            self._tell("on_preempt")
            self._save_now()

        return self.program.on_preempt(save, signals=self.preempt_signals)

    def _everybody(self, text: str) -> tuple[str, ...]:
        """Return every rank's text."""
        return tell(text, group_accelerator() or torch.device("cpu")) if many() else (text,)

    def _save_now(self) -> None:
        self._save()
        if self.saving is not None:
            with self.watch.on("save"):
                self.saving.result()

    def _save(self) -> None:
        if self.checkpoint_folder is None or self.saved == self.history.step:
            return
        start = time.perf_counter()
        with self.watch.on("save"):
            self.saving = self._begin_save()
        self.interval.note_save(self.saved, time.perf_counter() - start, self.saving)
        self.watch.note_save(self.saved)
        self._tell("on_save", self.saving)

    def _begin_save(self) -> Future[Path | str]:
        assert self.checkpoint_folder is not None
        if self.saving is not None:
            self.saving.result()  # raise an error of the save before
        self.saved = self.history.step
        return self.program.save_async(self.checkpoint_folder, **self._saved_now(self.data.state_dict()))

    def _rescue(self) -> None:
        """Save the state before a step that has failed, if this rank has all of it."""
        position = self.data.state_before_batch()
        if self.checkpoint_folder is None or position is None:
            return
        try:
            with self.watch.on("save"):
                if self.program.rescue(self.checkpoint_folder, **self._saved_now(position)) is not None:
                    self.watch.note_save(self.history.step)
        except CheckpointError as error:
            warnings.warn(CheckpointWarning(f"after a fault: {error}"), stacklevel=2)

    def _stored_scheduler(self) -> StoredScheduler | None:
        """Return what checkpoints have of the scheduler, which may have been replaced; None if nothing is saved."""
        if self.scheduler is None or self.checkpoint_folder is None:
            return None
        if self._stored is None or self._stored.scheduler is not self.scheduler:
            self._stored = StoredScheduler(self.scheduler, self.optimizer)
        return self._stored

    def _saved_now(self, position: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of :meth:`CompiledProgram.save`."""
        best = self.best if math.isfinite(self.best) else None
        at: dict[str, Any] = {"data": position, "bad": self.bad, "best": best}
        if (scheduler := self._stored_scheduler()) is not None:
            at["scheduler"] = scheduler.to_json()
        return {"step": self.history.step, "optimizer": self.optimizer, "extra": {"trainer": at}, "keep": self.keep}

    def _resume(self) -> None:
        if self.checkpoint_folder is None or self.history.step:
            return
        self.program.reserve(self.checkpoint_folder)  # now, and not after steps that would be lost
        if not goes_on(self.checkpoint_folder):
            return
        restored = self.program.load(self.checkpoint_folder, optimizer=self.optimizer, accept=self._require_own)
        path, at = shown(str(restored.path)), restored.extra["trainer"]
        self.data.load_state_dict(at.get("data", at))  # an earlier version had no "data"
        self.best, self.bad = math.inf if at["best"] is None else at["best"], at["bad"]
        self.history.stopped_early = self.patience is not None and self.bad >= self.patience
        scheduler = self._stored_scheduler()
        if scheduler is not None and "scheduler" in at:
            scheduler.set_state(at["scheduler"])
        elif scheduler is not None:
            message = f"{path} has no scheduler's state: this run's scheduler starts at its beginning"
            warnings.warn(CheckpointWarning(message), stacklevel=3)
        self.history.step = self.history.resumed_from = self.saved = restored.step

    def _require_own(self, checkpoint: Restored) -> None:
        """Refuse a checkpoint that no Trainer wrote (without a position in the data), or that was changed.

        Raises:
            CheckpointError: QN602.
        """
        if "trainer" not in checkpoint.extra:
            raise CheckpointError(
                "QN602",
                f"{checkpoint.path} was not written by a Trainer: where the data stood is not known",
                fix="load it with program.load(...), and give the Trainer another checkpoint_folder",
            )
        state, where = checkpoint.extra["trainer"], "state.json: extra.trainer"
        require_trainer_state(state, where)
        if (scheduler := self._stored_scheduler()) is not None and "scheduler" in state:
            scheduler.require(state["scheduler"], f"{where}.scheduler")
