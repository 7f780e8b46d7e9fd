"""Where the time of a run went, over all its starts: kept in its folder, so that a start knows of those before."""

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
from ..core.files import open_folder, open_plain, write_file

NAME = "time.json"
SPENT = ("step", "data", "compile", "validation", "save", "restart", "other")
_MARKS = 100  # of the last checkpoints; a run that goes back farther seems to have lost a little more


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
        """What was spent of what is left of this start, if a later one has gone on from ``step``."""
        if step >= self.step:
            return self.spent
        return next((spent for at, spent in reversed(self.marks) if at <= step), {})


class RunTime(BaseModel):
    """All starts of a run, in order."""

    model_config = ConfigDict(extra="forbid")

    version: int = 1
    starts: list[RunStart] = Field(default_factory=list)

    @classmethod
    def read(cls, folder: str | Path) -> RunTime:
        """What a Trainer has written in its log_folder, or else in its checkpoint_folder; empty if there is nothing.

        Raises:
            CompileError: QN207 if the file is not what a Trainer writes.
        """
        path = Path(folder) / NAME
        try:
            with open(open_plain(path), "rb") as file:
                found = cls.model_validate_json(file.read())
        except FileNotFoundError:
            return cls()
        except (OSError, ValidationError) as error:
            raise CompileError("QN207", f"{path}: {error}", fix="move the file away") from None
        if found.version != 1:
            raise CompileError(
                "QN207", f"{path} has version {found.version}", fix="read it with the version that wrote it"
            )
        return found

    def write(self, folder: Path) -> None:
        """Replace the file of a run."""
        folder.mkdir(parents=True, exist_ok=True)
        with open_folder(folder) as descriptor:
            write_file(descriptor, NAME, self.model_dump_json())

    @property
    def seconds(self) -> float:
        """Wall time from the first start to the last that is known."""
        return self.starts[-1].until - self.starts[0].began if self.starts else 0.0

    def shares(self) -> dict[str, float]:
        """Seconds of each kind of ``SPENT`` that were not in vain, and ``lost``: those spent on steps that were done
        again. They add up to :attr:`seconds`. Time between two starts is ``restart``."""
        found: dict[str, float] = dict.fromkeys((*SPENT, "lost"), 0.0)
        left = float("inf")  # the step that later starts went on from
        for number in reversed(range(len(self.starts))):
            start = self.starts[number]
            kept = start.kept(int(min(left, start.step)))
            for kind, seconds in kept.items():
                found[kind] += seconds
            found["lost"] += sum(start.spent.values()) - sum(kept.values())
            left = min(left, start.first)
            if number:
                found["restart"] += start.began - self.starts[number - 1].until
        return found

    def to_json(self) -> str:
        """Seconds of each kind, goodput, and how each start ended."""
        shares = self.shares()
        ends = [one.end for one in self.starts]
        document = {"seconds": self.seconds, "goodput": self.goodput, "starts": len(ends), "ends": ends, **shares}
        return json.dumps(document, indent=1)

    @property
    def goodput(self) -> float:
        """The share of wall time that is steps which are kept."""
        return self.shares()["step"] / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        if not self.starts:
            return f"there is no {NAME} here: give the log_folder of a Trainer, or its checkpoint_folder"
        whole, last = self.seconds or 1.0, self.starts[-1]
        counted = f"{len(self.starts)} start{'s' * (len(self.starts) > 1)}, step {last.step}"
        head = f"{long_time(self.seconds)}, {counted}: {self.goodput:.1%} steps that are kept"
        rows = sorted(self.shares().items(), key=lambda one: -one[1])
        return "\n".join([head, *(f"  {name:<10} {x / whole:>6.1%}  {long_time(x)}" for name, x in rows if x > 0)])


@dataclass
class Stopwatch:
    """Adds up one start of a run. ``folder``: of the file, None for none, and a damaged one is set aside; ``compiled``:
    seconds that this process has spent compiling so far, which are not counted as what it was doing meanwhile."""

    folder: Path | None
    compiled: Callable[[], float]
    clock: Callable[[], float] = time.monotonic
    every: float = 5.0  # seconds between writes: what a kill leaves unknown
    run: RunTime = field(default_factory=RunTime)
    failed: bool = False

    def __post_init__(self) -> None:
        if self.folder is not None:
            try:
                self.run = RunTime.read(self.folder)
            except CompileError:  # a machine that lost power may leave it so, and training must go on
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
        """Training goes on from ``step``."""
        self.start.first = self.start.step = step

    @contextlib.contextmanager
    def on(self, kind: str) -> Iterator[None]:
        """What is done inside is of this kind (but compiling)."""
        before, compiled = self.clock(), self.compiled()
        try:
            yield
        finally:
            compiling = self.compiled() - compiled
            self._add("compile", compiling)
            self._add(kind, self.clock() - before - compiling)

    def step(self, step: int) -> None:
        """A step was done."""
        self.start.step = step
        if self.clock() - self.written > self.every:
            self.write()

    def saved(self, step: int) -> None:
        """A checkpoint of ``step`` was begun."""
        self._other()
        self.start.marks = [*self.start.marks, (step, dict(self.start.spent))][-_MARKS:]
        self.write()

    def end(self, how: str) -> None:
        """This start ends: ``"finished"``, ``"preempted"`` or ``"failed"``."""
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
        """Whatever no kind was named for."""
        whole = time.time() - self.start.began
        self.start.until = self.start.began + whole
        known = sum(x for kind, x in self.start.spent.items() if kind != "other")
        self.start.spent["other"] = max(0.0, whole - known)

    def _add(self, kind: str, seconds: float) -> None:
        self.start.spent[kind] = self.start.spent.get(kind, 0.0) + seconds


def long_time(seconds: float) -> str:
    """For people, of a run.

    >>> long_time(12), long_time(600), long_time(9000)
    ('12.0 s', '10.0 min', '2.5 h')
    """
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
