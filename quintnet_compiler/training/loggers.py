"""Loggers of a run's numbers: the console, JSON lines, TensorBoard, Weights & Biases."""

from __future__ import annotations

import errno
import json
import math
import os
import time
import warnings
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.errors import CompileError, LogWarning
from ..core.files import drop_output, open_to_append, path_of, print_text, replace_file
from .callbacks import Callback

if TYPE_CHECKING:
    from .trainer import Trainer


class Logger(Callback):
    """A callback that writes numbers, on one rank.

    An error in it does not end the run: the first one is a :class:`quintnet.LogWarning`. Only an error of QuintNet
    itself, such as QN108 for a library that is missing, ends it.
    """

    failed = False

    @property
    def name(self) -> str:
        """Return a description of the log, for people."""
        return type(self).__name__

    def fail(self, error: Exception) -> None:
        """Warn, the first time."""
        if not self.failed:
            self.failed = True
            warn_of_log(self.name, error)

    def open(self) -> None:
        """Before the first number."""

    def write(self, step: int, kind: str, numbers: Mapping[str, float]) -> None:
        """Write numbers; ``kind``: ``"train"``, ``"validation"``, or ``"resumed"`` and ``"preempted"`` without any."""

    def close(self) -> None:
        """After the last number."""

    def on_start(self, trainer: Trainer) -> None:
        if trainer.program.first:
            self.open()
        if trainer.history.resumed_from is not None:
            self._on("resumed", trainer, {})

    def on_log(self, trainer: Trainer, numbers: Mapping[str, float]) -> None:
        self._on("train", trainer, numbers)

    def on_validation(self, trainer: Trainer, numbers: Mapping[str, float]) -> None:
        self._on("validation", trainer, numbers)

    def on_preempt(self, trainer: Trainer) -> None:
        self._on("preempted", trainer, {})

    def on_end(self, trainer: Trainer) -> None:
        if trainer.program.first:
            self.close()

    def _on(self, kind: str, trainer: Trainer, numbers: Mapping[str, float]) -> None:
        if trainer.program.first:
            self.write(trainer.history.step, kind, numbers)


def warn_of_log(name: str, error: Exception) -> None:
    """Warn of a log that cannot be written."""
    text = f"{name} cannot be written ({type(error).__name__}: {error}): the run goes on"
    warnings.warn(LogWarning(text), stacklevel=4)


def write_log_file(path: Path, text: str) -> None:
    """Replace a file of a log; a link of that name, too, and not what it leads to. Warn if it cannot be written."""
    try:
        replace_file(path, text)
    except (OSError, CompileError) as error:
        warn_of_log(str(path), error)


class ConsoleLogger(Logger):
    """One line for each step that is logged, and at the end where the time went."""

    name = "the console"

    def fail(self, error: Exception) -> None:
        if isinstance(error, BrokenPipeError):  # the reader has gone: the process must not fail at its end
            drop_output()
        super().fail(error)

    def write(self, step: int, kind: str, numbers: Mapping[str, float]) -> None:
        texts = "   ".join(f"{_LABELS.get(name, name)} {_shown(name, x)}" for name, x in numbers.items())
        line = f"{kind} {step:>7}   {texts}" if kind != "train" else f"step {step:>7}   {texts}"
        print(line.rstrip(), flush=True)

    def on_end(self, trainer: Trainer) -> None:
        if trainer.program.first:
            print_text(str(trainer.time))


class JsonLogger(Logger):
    """``metrics.jsonl``: an object in each line. A run that goes on appends."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = path_of(folder, "QN701")
        self.file: FileIO | None = None

    @property
    def name(self) -> str:
        return str(self.folder / "metrics.jsonl")

    def open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file = FileIO(open_to_append(self.folder / "metrics.jsonl"), "ab")
        if self._cut():
            self.file.write(b"\n")

    def _cut(self) -> bool:
        """Return whether the last line is incomplete, after a crash or with a full disk.

        The next line must not become a part of it.
        """
        with (self.folder / "metrics.jsonl").open("rb") as written:
            size = written.seek(0, 2)
            written.seek(max(0, size - 1))
            return written.read() not in (b"", b"\n")

    def write(self, step: int, kind: str, numbers: Mapping[str, float]) -> None:
        # JSON has no NaN and no Inf
        plain: dict[str, Any] = {name: x if math.isfinite(x) else str(x) for name, x in numbers.items()}
        line = (json.dumps({"time": time.time(), "step": step, "kind": kind, **plain}) + "\n").encode()
        try:
            if self.file is None:
                self.open()
            assert self.file is not None
            if self.file.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            self.close()  # the next line opens it again
            raise

    def close(self) -> None:
        if self.file is not None:
            file, self.file = self.file, None
            file.close()


class TensorBoardLogger(Logger):
    """Scalars for TensorBoard (``pip install tensorboard``) in ``folder``, as ``train/loss``, ``validation/loss``, ...

    Raises:
        CompileError: QN108 when the run starts, if tensorboard cannot be imported.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = path_of(folder, "QN701")
        self.writer: Any = None

    @property
    def name(self) -> str:
        return f"{self.folder} (TensorBoard)"

    def open(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise CompileError(
                "QN108", f"tensorboard cannot be imported: {error}", fix="pip install tensorboard"
            ) from error
        self.writer = SummaryWriter(str(self.folder))

    def write(self, step: int, kind: str, numbers: Mapping[str, float]) -> None:
        if self.writer is None:
            self.open()
        for name, x in numbers.items():
            self.writer.add_scalar(f"{kind}/{name}", x, step)

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


class WandbLogger(Logger):
    """Numbers for Weights & Biases (``pip install wandb``), as ``train/loss``, ``validation/loss``, ...

    Args:
        options: those of ``wandb.init``. A run that may be started again needs an ``id``, and ``resume="allow"``.

    Raises:
        CompileError: QN108 when the run starts, if wandb cannot be imported.
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.run: Any = None

    def open(self) -> None:
        try:
            import wandb
        except ImportError as error:
            raise CompileError("QN108", f"wandb cannot be imported: {error}", fix="pip install wandb") from error
        self.run = wandb.init(**self.options)

    def write(self, step: int, kind: str, numbers: Mapping[str, float]) -> None:
        if self.run is not None and numbers:
            self.run.log({f"{kind}/{name}": x for name, x in numbers.items()}, step=step)

    def close(self) -> None:
        if self.run is not None:
            self.run.finish()


_LABELS = {"grad_norm": "grad", "memory_gib": "memory", "tokens_per_second": "tokens/s", "rows_per_second": "rows/s"}


def _shown(name: str, x: float) -> str:
    if name == "memory_gib":
        return f"{x:.2f} GiB"
    if name.endswith("_per_second"):
        return f"{x:,.0f}"
    if name in ("accuracy", "mfu"):
        return f"{x:.2%}"
    return f"{x:.2e}" if name == "lr" else f"{x:.4f}"
