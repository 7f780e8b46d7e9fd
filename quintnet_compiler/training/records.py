"""Where a run's numbers go: a line on the console, JSON lines, TensorBoard."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ..core.errors import CompileError


class Record(Protocol):
    def write(self, step: int, kind: str, numbers: Mapping[str, float]) -> None:
        """``kind``: ``"train"``, ``"validation"``, or ``"resumed"`` and ``"preempted"``, which have no numbers."""
        ...

    def close(self) -> None: ...


class ConsoleRecord:
    """One line for each step that is logged."""

    def write(self, step: int, kind: str, numbers: Mapping[str, float]) -> None:
        told = "   ".join(f"{_LABELS.get(name, name)} {_shown(name, x)}" for name, x in numbers.items())
        line = f"{kind} {step:>7}   {told}" if kind != "train" else f"step {step:>7}   {told}"
        print(line.rstrip(), flush=True)

    def close(self) -> None:
        pass


class JsonRecord:
    """``metrics.jsonl``: an object in each line. A run that goes on appends."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file = (folder / "metrics.jsonl").open("a", encoding="utf-8")

    def write(self, step: int, kind: str, numbers: Mapping[str, float]) -> None:
        # JSON has no NaN and no Inf
        plain: dict[str, Any] = {name: x if math.isfinite(x) else str(x) for name, x in numbers.items()}
        self.file.write(json.dumps({"time": time.time(), "step": step, "kind": kind, **plain}) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class TensorBoardRecord:
    """Scalars for TensorBoard, which must be installed."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise CompileError("QN108", "tensorboard is not installed", fix="pip install tensorboard") from None
        self.writer: Any = SummaryWriter(str(folder))

    def write(self, step: int, kind: str, numbers: Mapping[str, float]) -> None:
        for name, x in numbers.items():
            self.writer.add_scalar(f"{kind}/{name}", x, step)

    def close(self) -> None:
        self.writer.close()


_LABELS = {"grad_norm": "grad", "memory_gib": "memory", "tokens_per_second": "tokens/s", "rows_per_second": "rows/s"}


def _shown(name: str, x: float) -> str:
    if name == "memory_gib":
        return f"{x:.2f} GiB"
    if name.endswith("_per_second"):
        return f"{x:,.0f}"
    if name in ("accuracy", "mfu"):
        return f"{x:.2%}"
    return f"{x:.2e}" if name == "lr" else f"{x:.4f}"
