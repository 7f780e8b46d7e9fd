"""Read the numbers of a run from its ``metrics.jsonl`` as that grows."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from ..reports.line_chart import Span

NAME = "metrics.jsonl"
MAX_SPANS = 600  # of a curve; at twice as many, pairs are joined
MAX_CURVES = 64  # further names are left out, and counted
_CHUNK_BYTES = 1 << 22  # a longer line is no line of metrics
_HEAD_BYTES = 256
_NO_NUMBERS = frozenset({"time", "step", "kind"})


@dataclass
class Curve:
    """Values by step, in bounded memory: each span stands for ``each`` of them, which doubles as the run goes on.

    Steps that come again replace the earlier ones: the run went back to a checkpoint.
    """

    spans: list[Span] = field(default_factory=list)
    each: int = 1
    _open: int = 0  # values in the last span

    def add(self, step: int, value: float) -> None:
        """Add the value at a step."""
        if self.spans and step <= self.spans[-1].last:
            self.back_to(step)
        span = Span(step, step, value, value, value) if math.isfinite(value) else _bad(step)
        if self.spans and 0 < self._open < self.each:
            self.spans[-1], self._open = _joined(self.spans[-1], span, self._open), self._open + 1
        else:
            self.spans.append(span)
            self._open = 1
        if len(self.spans) >= 2 * MAX_SPANS and self._open >= self.each:
            pairs = zip(self.spans[::2], self.spans[1::2], strict=True)
            self.spans = [_joined(a, b) for a, b in pairs]
            self.each = self._open = 2 * self.each

    def back_to(self, step: int) -> None:
        """Forget this step and later ones. A span that began before it stays."""
        while self.spans and self.spans[-1].first >= step:
            self.spans.pop()
        if self.spans and self.spans[-1].last >= step:
            last = self.spans[-1]
            self.spans[-1] = Span(last.first, step - 1, last.low, last.high, last.mean, last.bad)
        self._open = 0


def _bad(step: int) -> Span:
    return Span(step, step, math.nan, math.nan, math.nan, 1)


def _joined(a: Span, b: Span, weight: int = 1) -> Span:
    """Return two spans as one; the mean of ``a`` is of ``weight`` values."""
    bad = a.bad + b.bad
    if not (a.finite and b.finite):
        finite = b if b.finite else a
        return Span(a.first, b.last, finite.low, finite.high, finite.mean, bad)
    mean = a.mean + (b.mean - a.mean) / (weight + 1)
    return Span(a.first, b.last, min(a.low, b.low), max(a.high, b.high), mean, bad)


@dataclass
class RunMetrics:
    """The content of ``metrics.jsonl`` in a folder. ``read()`` reads lines that were written since the last time.

    A line that is incomplete, because it is being written or the machine stopped, is left until it is whole; a line
    without metrics is counted in ``unreadable``. ``newest``: the last value of each number, by (kind, name). ``marks``:
    (step, event).
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
    _head: bytes = b""  # the first bytes of the file, which distinguish it from another

    def read(self) -> bool:
        """Read new lines, and return whether there were some. A shorter or another file is read from its beginning."""
        try:
            with (self.folder / NAME).open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset or file.read(len(self._head)) != self._head:
                    vars(self).update(vars(RunMetrics(self.folder)))
                return self._read(file)
        except OSError:  # missing, at least for now
            return False

    def _read(self, file: BinaryIO) -> bool:
        file.seek(self._offset)
        old_offset = self._offset
        while chunk := file.read(_CHUNK_BYTES):
            whole = chunk.rfind(b"\n") + 1
            if not whole:
                if len(chunk) < _CHUNK_BYTES:
                    break
                self.unreadable, whole = self.unreadable + 1, len(chunk)  # a part of a line that is too long
            for line in chunk[:whole].splitlines():
                self._line(line)
            self._offset += whole
            file.seek(self._offset)
        if not self._head:
            file.seek(0)
            self._head = file.read(min(_HEAD_BYTES, self._offset))
        return self._offset != old_offset

    def _line(self, line: bytes) -> None:
        if not line.strip():
            return
        self.lines += 1
        try:
            entry = json.loads(line)
            step, kind = _step_of(entry), str(entry["kind"])
            numbers = {name: x for name, x in map(_number, entry.items()) if x is not None}
            at = _number(("", entry.get("time")))[1]
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
            if key not in self.curves and len(self.curves) >= MAX_CURVES:
                self.left_out += 1
                continue
            self.curves.setdefault(key, Curve()).add(step, x)
            self.newest[key] = x

    def _time(self, at: float | None) -> None:
        if at is not None and math.isfinite(at):
            self.began = at if self.began is None else min(self.began, at)
            self.until = at if self.until is None else max(self.until, at)

    def _back(self, step: int) -> None:
        """Forget steps that the run does again."""
        for curve in self.curves.values():
            curve.back_to(step)
        if not self.marks or self.marks[-1][0] > step or not self.marks[-1][1].startswith("resumed"):
            self._mark(step, f"went back from step {self.step} to step {step}")

    def _mark(self, step: int, text: str) -> None:
        self.marks = [*self.marks, (step, text)][-200:]


def _step_of(entry: Any) -> int:
    """Return the step of a line; raise ValueError if it is no count that a float holds exactly."""
    step = entry["step"]
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 53:
        raise ValueError(f"step {step!r} is no count")
    return step


def _number(item: tuple[str, Any]) -> tuple[str, float | None]:
    """Return a name and its number; NaN and infinity are texts in JSON."""
    name, x = item
    if name in _NO_NUMBERS or isinstance(x, bool):
        return name, None
    if isinstance(x, str):
        return name, float(x) if x in ("nan", "inf", "-inf") else None
    return name, float(x) if isinstance(x, (int, float)) else None
