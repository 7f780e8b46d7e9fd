"""Decide after which steps a Trainer saves."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from ..core.errors import CompileError
from ..cost_models.checkpoint_interval import daly_interval

FIRST_STEPS = 10  # until the first save, with "auto"
Told = Callable[[str], tuple[str, ...]]


@dataclass
class SaveInterval:
    """The number of steps between saves.

    ``every``: steps, None for never, or ``"auto"``: the interval that loses the least time to saves and to faults,
    ``between_failures`` seconds apart on average (Daly's optimum), by the times of steps and saves in this run.
    ``told``: gives every rank's text to every rank; it is called once per save, so that they agree.

    Raises:
        CompileError: QN108 for ``"auto"`` without ``between_failures``, or for an interval that is not positive.
    """

    every: int | Literal["auto"] | None
    between_failures: float | None
    told: Told
    clock: Callable[[], float] = time.monotonic
    steps: int = FIRST_STEPS  # between saves, with "auto"
    last: int = 0
    writing: float = 0.0  # seconds that writing a checkpoint took last
    passed: list[float] = field(default_factory=list)  # seconds of each step since the last save

    def __post_init__(self) -> None:
        if self.every == "auto" and self.between_failures is None:
            raise CompileError(
                "QN108",
                "save_every='auto' without the mean time between failures",
                fix="give mean_time_between_failures=, in seconds: of the whole run (that of a node / nodes)",
            )
        if self.every == "auto":
            daly_interval(1.0, self.between_failures or 0.0)
        elif self.every is not None and (type(self.every) is not int or self.every < 1):
            raise CompileError("QN108", f"save_every={self.every!r}", fix="give steps, None or 'auto'")

    def begin(self, step: int) -> None:
        """Begin after ``step``."""
        self.last = step

    def due(self, step: int, seconds: float) -> bool:
        """Return whether to save after ``step``, which took ``seconds``."""
        self.passed.append(seconds)
        if self.every == "auto":
            return step - self.last >= self.steps
        return self.every is not None and step % self.every == 0

    def note_save(self, step: int, stall: float, saving: Future[Any]) -> None:
        """Record a save after ``step`` that stalled training for ``stall`` seconds. Every rank calls this."""
        self.last, began = step, self.clock()

        def whole(_: Future[Any]) -> None:
            self.writing = stall + self.clock() - began

        saving.add_done_callback(whole)
        if self.every == "auto" and self.passed:
            mine = [sorted(self.passed)[len(self.passed) // 2], stall, self.writing]
            times = [json.loads(text) for text in self.told(json.dumps(mine))]
            self.steps = self._steps(*(max(column) for column in zip(*times, strict=True)))
        self.passed = []

    def _steps(self, step: float, stall: float, writing: float) -> int:
        """Return the steps between saves: at least as many as writing a checkpoint takes."""
        assert self.between_failures is not None
        best = daly_interval(max(stall, 1e-6), self.between_failures)
        return max(1, round(best / step), math.ceil(writing / step))
