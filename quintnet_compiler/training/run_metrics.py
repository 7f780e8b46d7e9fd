"""The numbers of a run, read from its ``metrics.jsonl`` as that grows."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from ..reports.line_chart import Span

NAME = "metrics.jsonl"
MOST_SPANS = 600  # of a curve: from twice as many, two become one
MOST_CURVES = 64  # further names are left out, and counted
_CHUNK = 1 << 22  # bytes; a longer line is no line of metrics
_HEAD = 256  # bytes
_NO_NUMBERS = frozenset({"time", "step", "kind"})


@dataclass
class Curve:
    """Values by step, in bounded memory: each span stands for ``each`` of them, which doubles as the run goes on.

    Steps that come again replace those that were there: the run went back to a checkpoint.
    """

    spans: list[Span] = field(default_factory=list)
    each: int = 1
    _open: int = 0  # values in the last span

    def add(self, step: int, value: float) -> None:
        """The value at a step."""
        if self.spans and step <= self.spans[-1].last:
            self.back_to(step)
        one = Span(step, step, value, value, value) if math.isfinite(value) else _bad(step)
        if self.spans and 0 < self._open < self.each:
            self.spans[-1], self._open = _joined(self.spans[-1], one, self._open), self._open + 1
        else:
            self.spans.append(one)
            self._open = 1
        if len(self.spans) >= 2 * MOST_SPANS and self._open >= self.each:
            pairs = zip(self.spans[::2], self.spans[1::2], strict=True)
            self.spans = [_joined(a, b) for a, b in pairs]
            self.each = self._open = 2 * self.each

    def back_to(self, step: int) -> None:
        """Forget what was known of this step and later ones. A span that began before it stays."""
        while self.spans and self.spans[-1].first >= step:
            self.spans.pop()
        if self.spans and self.spans[-1].last >= step:
            last = self.spans[-1]
            self.spans[-1] = Span(last.first, step - 1, last.low, last.high, last.mean, last.bad)
        self._open = 0


def _bad(step: int) -> Span:
    return Span(step, step, math.nan, math.nan, math.nan, 1)


def _joined(a: Span, b: Span, weight: int = 1) -> Span:
    """Both as one; the mean has ``weight`` values of ``a``."""
    bad = a.bad + b.bad
    if not (a.finite and b.finite):
        one = b if b.finite else a
        return Span(a.first, b.last, one.low, one.high, one.mean, bad)
    mean = a.mean + (b.mean - a.mean) / (weight + 1)
    return Span(a.first, b.last, min(a.low, b.low), max(a.high, b.high), mean, bad)


@dataclass
class RunMetrics:
    """What ``metrics.jsonl`` in a folder says. ``read()`` takes in what was written since the last time.

    A line that is cut, because it is being written or because the machine stopped there, is left until it is whole; one
    that is no line of metrics is counted in ``unreadable``. ``newest``: the last value of each number, by (kind, name).
    ``marks``: (step, what happened there).
    """

    folder: Path
    curves: dict[tuple[str, str], Curve] = field(default_factory=dict)
    newest: dict[tuple[str, str], float] = field(default_factory=dict)
    marks: list[tuple[int, str]] = field(default_factory=list)
    step: int | None = None
    began: float | None = None
    until: float | None = None
    lines: int = 0
    unreadable: int = 0
    left_out: int = 0
    _offset: int = 0
    _head: bytes = b""  # how the file begins, which tells it from another

    def read(self) -> bool:
        """Whether there was something new. A file that got shorter, or another one, is read from its beginning."""
        try:
            with (self.folder / NAME).open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset or file.read(len(self._head)) != self._head:
                    vars(self).update(vars(RunMetrics(self.folder)))
                return self._read(file)
        except OSError:  # not there yet, or not for now
            return False

    def _read(self, file: BinaryIO) -> bool:
        file.seek(self._offset)
        before = self._offset
        while chunk := file.read(_CHUNK):
            whole = chunk.rfind(b"\n") + 1
            if not whole:
                if len(chunk) < _CHUNK:
                    break
                self.unreadable, whole = self.unreadable + 1, len(chunk)  # the rest of it is no line either
            for line in chunk[:whole].splitlines():
                self._line(line)
            self._offset += whole
            file.seek(self._offset)
        if not self._head:
            file.seek(0)
            self._head = file.read(min(_HEAD, self._offset))
        return self._offset != before

    def _line(self, line: bytes) -> None:
        if not line.strip():
            return
        self.lines += 1
        try:
            found = json.loads(line)
            step, kind = found["step"], str(found["kind"])
            if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 53:
                raise ValueError
            numbers = {name: x for name, x in map(_number, found.items()) if x is not None}
            at = _number(("", found.get("time")))[1]
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            self.unreadable += 1
            return
        self._time(at)
        if kind == "train" and self.step is not None and step <= self.step:
            self._back(step)
        if kind in ("resumed", "preempted"):
            self._mark(step, f"{kind} at step {step}")
            return
        self.step = step if kind == "train" or self.step is None else max(step, self.step)
        for name, x in numbers.items():
            key = kind, name
            if key not in self.curves and len(self.curves) >= MOST_CURVES:
                self.left_out += 1
                continue
            self.curves.setdefault(key, Curve()).add(step, x)
            self.newest[key] = x

    def _time(self, at: float | None) -> None:
        if at is not None and math.isfinite(at):
            self.began = at if self.began is None else min(self.began, at)
            self.until = at if self.until is None else max(self.until, at)

    def _back(self, step: int) -> None:
        """The run does this step again."""
        for curve in self.curves.values():
            curve.back_to(step)
        if not self.marks or self.marks[-1][0] > step or not self.marks[-1][1].startswith("resumed"):
            self._mark(step, f"went back from step {self.step} to step {step}")

    def _mark(self, step: int, text: str) -> None:
        self.marks = [*self.marks, (step, text)][-200:]


def _number(item: tuple[str, Any]) -> tuple[str, float | None]:
    """A name and its number; JSON has no NaN and no Inf, which are texts there."""
    name, x = item
    if name in _NO_NUMBERS or isinstance(x, bool):
        return name, None
    if isinstance(x, str):
        return name, float(x) if x in ("nan", "inf", "-inf") else None
    return name, float(x) if isinstance(x, (int, float)) else None
