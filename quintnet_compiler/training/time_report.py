"""A report of where a run's time went, over all its starts, stored in its folder."""

from __future__ import annotations

import contextlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..core.errors import CompileError, LogWarning
from ..core.files import open_plain, path_of, replace_file

NAME = "time.json"
SPENT = ("step", "data", "compile", "validation", "save", "restart", "other")
_MAX_MARKS = 100  # of the last checkpoints; a run that goes back farther seems to lose a little more


class RunStart(BaseModel):
    """One start of a run. Times are seconds.

    Attributes:
        began: when, in seconds since 1970; ``until``: when this was written last.
        first: the step that it went on from; ``step``: the last that it has done.
        spent: on what, see ``SPENT``.
        marks: at each checkpoint, the step and what had been spent until then.
        end: ``"finished"``, ``"preempted"``, ``"failed"``, or ``""``: it was killed, or it still runs.
    """

    model_config = ConfigDict(extra="forbid")

    began: float
    until: float
    first: int = 0
    step: int = 0
    spent: dict[str, float] = Field(default_factory=dict)
    marks: list[tuple[int, dict[str, float]]] = Field(default_factory=list)
    end: str = ""

    def kept(self, step: int) -> dict[str, float]:
        """Return the time spent on the steps of this start up to ``step``, from which a later one resumed."""
        if step >= self.step:
            return self.spent
        return next((spent for at, spent in reversed(self.marks) if at <= step), {})


class RunTime(BaseModel):
    """All starts of a run, in order."""

    model_config = ConfigDict(extra="forbid")

    version: int = 1
    starts: list[RunStart] = Field(default_factory=list)

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> RunTime:
        """Read the report of a Trainer in its log_folder, or else checkpoint_folder; empty if there is none.

        Raises:
            CompileError: QN207 if the file is not what a Trainer writes.
        """
        path = path_of(folder, "QN207") / NAME
        try:
            with open(open_plain(path), "rb") as file:
                report = cls.model_validate_json(file.read())
        except FileNotFoundError:
            return cls()
        except (OSError, ValidationError) as error:
            raise CompileError("QN207", f"{path}: {error}", fix="move the file away") from None
        if report.version != 1:
            raise CompileError(
                "QN207", f"{path} has version {report.version}", fix="read it with the version that wrote it"
            )
        return report

    def write(self, folder: Path) -> None:
        """Replace the file of a run."""
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / NAME, self.model_dump_json())

    @property
    def seconds(self) -> float:
        """Return the wall time from the first start to the last record."""
        return self.starts[-1].until - self.starts[0].began if self.starts else 0.0

    def shares(self) -> dict[str, float]:
        """Return the seconds of each kind of ``SPENT``, and ``lost``: of steps that were done again.

        They add up to :attr:`seconds`. Time between two starts is ``restart``.
        """
        seconds_of: dict[str, float] = dict.fromkeys((*SPENT, "lost"), 0.0)
        resumed = float("inf")  # the step from which later starts resumed
        for number in reversed(range(len(self.starts))):
            start = self.starts[number]
            kept = start.kept(int(min(resumed, start.step)))
            for kind, seconds in kept.items():
                seconds_of[kind] += seconds
            seconds_of["lost"] += sum(start.spent.values()) - sum(kept.values())
            resumed = min(resumed, start.first)
            if number:
                seconds_of["restart"] += start.began - self.starts[number - 1].until
        return seconds_of

    def to_json(self) -> str:
        """Return seconds of each kind, goodput, and how each start ended."""
        shares = self.shares()
        ends = [start.end for start in self.starts]
        document = {"seconds": self.seconds, "goodput": self.goodput, "starts": len(ends), "ends": ends, **shares}
        return json.dumps(document, indent=1)

    @property
    def goodput(self) -> float:
        """Return the share of wall time spent on steps that were not done again."""
        return self.shares()["step"] / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        if not self.starts:
            return f"there is no {NAME} here: give the log_folder of a Trainer, or its checkpoint_folder"
        whole, last = self.seconds or 1.0, self.starts[-1]
        counted = f"{len(self.starts)} start{'s' * (len(self.starts) > 1)}, step {last.step}"
        head = f"{long_time(self.seconds)}, {counted}: {self.goodput:.1%} steps that are kept"
        rows = sorted(self.shares().items(), key=lambda item: -item[1])
        return "\n".join([head, *(f"  {name:<10} {x / whole:>6.1%}  {long_time(x)}" for name, x in rows if x > 0)])


@dataclass
class Stopwatch:
    """The times of one start of a run.

    ``folder``: of the file, None for none; a damaged file is set aside. ``compiled``: returns the seconds that this
    process has spent compiling so far, which do not count for the kind during which it compiled.
    """

    folder: Path | None
    compiled: Callable[[], float]
    clock: Callable[[], float] = time.monotonic
    every: float = 5.0  # seconds between writes, which a kill loses
    run: RunTime = field(default_factory=RunTime)
    failed: bool = False

    def __post_init__(self) -> None:
        if self.folder is not None:
            try:
                self.run = RunTime.read(self.folder)
            except CompileError:  # after a power failure, for example; training must go on
                try:
                    os.replace(self.folder / NAME, self.folder / f"{NAME}.damaged")
                except OSError as error:
                    self._fail(error)
        now = time.time()
        self.start = RunStart(began=now, until=now)
        self.run.starts.append(self.start)
        self.zero = self.written = self.clock()
        self._add("compile", self.compiled())  # before this was made
        self.start.began -= self.compiled()

    def begin(self, step: int) -> None:
        """Begin training after ``step``."""
        self.start.first = self.start.step = step

    @contextlib.contextmanager
    def on(self, kind: str) -> Iterator[None]:
        """Count the time inside as this kind (except compiling)."""
        began, compiled = self.clock(), self.compiled()
        try:
            yield
        finally:
            compiling = self.compiled() - compiled
            self._add("compile", compiling)
            self._add(kind, self.clock() - began - compiling)

    def step(self, step: int) -> None:
        """Record a step."""
        self.start.step = step
        if self.clock() - self.written > self.every:
            self.write()

    def note_save(self, step: int) -> None:
        """Record that a checkpoint of ``step`` was begun."""
        self._other()
        self.start.marks = [*self.start.marks, (step, dict(self.start.spent))][-_MAX_MARKS:]
        self.write()

    def end(self, how: str) -> None:
        """Record the end of this start: ``"finished"``, ``"preempted"`` or ``"failed"``."""
        self.write(how)

    def write(self, end: str = "") -> None:
        """Replace the file, if there is one."""
        self._other()
        self.start.end, self.written = end, self.clock()
        if self.folder is not None:
            try:
                self.run.write(self.folder)
            except (OSError, CompileError) as error:
                self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Warn, the first time: training goes on."""
        assert self.folder is not None
        if not self.failed:
            self.failed = True
            text = f"{self.folder / NAME} cannot be written ({error}): the run goes on"
            warnings.warn(LogWarning(text), stacklevel=4)

    def _other(self) -> None:
        """Count all time without a kind as ``other``."""
        whole = time.time() - self.start.began
        self.start.until = self.start.began + whole
        counted = sum(x for kind, x in self.start.spent.items() if kind != "other")
        self.start.spent["other"] = max(0.0, whole - counted)

    def _add(self, kind: str, seconds: float) -> None:
        self.start.spent[kind] = self.start.spent.get(kind, 0.0) + seconds


def long_time(seconds: float) -> str:
    """Return a duration as text, for people.

    >>> long_time(12), long_time(600), long_time(9000)
    ('12.0 s', '10.0 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
