"""A run as a page: its numbers over steps, the last measured step, and where the time went."""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ..core import html
from ..core.errors import CompileError, LogWarning
from ..reports.line_chart import Line, line_chart, short
from ..simulation.chart import figure_svg
from ..simulation.timeline import Timeline, duration
from .run_metrics import RunMetrics
from .time_report import RunTime, long_time

PAGE, TIMELINE = "page.html", "timeline.json"
_TITLES = {
    "loss": "loss", "tokens_per_second": "tokens per second", "rows_per_second": "rows per second",
    "memory_gib": "memory in GiB", "grad_norm": "norm of the gradient", "lr": "learning rate",
    "mfu": "model FLOP utilisation", "accuracy": "accuracy", "perplexity": "perplexity",
}  # fmt: skip
_QUIET = 120.0  # seconds without a line, after which a run that has not ended may have been killed
_COLOURS = {  # of where the time went
    "step": "var(--dp)", "compile": "var(--ep)", "data": "var(--pp)", "save": "var(--cp)", "lost": "var(--tp)",
    "validation": "color-mix(in srgb, var(--dp) 45%, transparent)", "restart": "var(--soft)",
    "other": "color-mix(in srgb, var(--soft) 45%, transparent)",
}  # fmt: skip


@dataclass
class RunPage:
    """What is known of the run in ``folder``, a Trainer's log_folder. ``update()`` reads what was added.

    ``html()`` is a page that needs nothing else; a notebook shows the same.
    """

    folder: Path
    metrics: RunMetrics = field(init=False)
    timeline: Timeline | None = None
    spent: RunTime = field(default_factory=RunTime)
    clock: Callable[[], float] = time.time
    _seen: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.metrics = RunMetrics(self.folder)

    def update(self) -> bool:
        """Whether anything is new."""
        changed = self.metrics.read()
        seen = tuple(_changed_at(self.folder / name) for name in (TIMELINE, "time.json"))
        if seen != self._seen:
            changed, self._seen = True, seen
            with contextlib.suppress(
                CompileError, OSError
            ):  # it is being written, or damaged: what was there before stays
                self.timeline = Timeline.load(self.folder / TIMELINE) if seen[0] else None
            with contextlib.suppress(CompileError):
                self.spent = RunTime.read(self.folder)
        return changed

    @property
    def end(self) -> str:
        """How the newest start of the run ended: ``"finished"``, ``"preempted"``, ``"failed"``, or ``""`` while it
        runs (or after it was killed)."""
        return self.spent.starts[-1].end if self.spent.starts else ""

    def html(self, refresh: int = 0) -> str:
        """The page. ``refresh``: seconds after which a browser looks again."""
        return html.page("quintnet_compiler.training", "run_page.html.jinja", refresh=refresh, **self._given())

    def _repr_html_(self) -> str:
        self.update()
        return html.figure("quintnet_compiler.training", "run.html.jinja", **self._given())

    def write(self, path: Path, refresh: int = 0) -> None:
        """Replace ``path`` by the page at once, so that no browser reads a half of it."""
        part = path.with_name(f".{path.name}.part")
        part.write_text(self.html(refresh), encoding="utf-8")
        os.replace(part, path)

    def _given(self) -> dict[str, Any]:
        # templates of pictures have escaped them
        return {
            "title": self.folder.resolve().name, "cards_shown": self._cards(), "state": self._state(),
            "notes": self._notes(), "charts": [Markup(one) for one in self._charts()],
            "timeline": self.timeline, "duration": duration,
            "picture": Markup(figure_svg(self.timeline)) if self.timeline is not None else "", "shares": self._shares(),
        }  # fmt: skip

    def _cards(self) -> list[tuple[str, str]]:
        known, found = self.metrics, list[tuple[str, str]]()
        if known.step is not None:
            found.append(("step", f"{known.step:,}"))
        for key in (("train", "loss"), ("validation", "loss")):
            if key in known.newest:
                found.append((f"{'validation ' * (key[0] != 'train')}loss", f"{known.newest[key]:.4g}"))
        for name in ("tokens_per_second", "rows_per_second", "memory_gib", "mfu"):
            if (x := known.newest.get(("train", name))) is not None:
                found.append((_TITLES[name], f"{x:.1%}" if name == "mfu" else short(x)))
        if known.began is not None and known.until is not None:
            found.append(("from first to last line", long_time(known.until - known.began)))
        return found

    def _state(self) -> str:
        known, now = self.metrics, self.clock()
        if known.until is None:
            return "no line of metrics.jsonl yet"
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(known.until))
        starts = len(self.spent.starts)
        started = f"start {starts}, " if starts > 1 else ""
        if self.end:
            return f"{started}{self.end}; the last line is of {at}"
        silent = f", {long_time(now - known.until)} ago: it may have been killed" if now - known.until > _QUIET else ""
        return f"{started}running; the last line is of {at}{silent}"

    def _notes(self) -> list[str]:
        known = self.metrics
        found = [text for _, text in known.marks[-5:]]
        more = len(known.marks) - len(found)
        found = [*([f"{more} restarts before"] if more else []), *found]
        found += [f"{known.unreadable} of {known.lines} lines could not be read"] if known.unreadable else []
        found += [f"values of further names are left out: {known.left_out}"] if known.left_out else []
        return found

    def _charts(self) -> list[str]:
        curves, drawn = self.metrics.curves, list[str]()
        names = list(dict.fromkeys([*_TITLES, *(name for _, name in curves)]))
        for name in names:
            kinds = [kind for kind, known in curves if known == name]
            lines = [Line(kind, curves[kind, name].spans) for kind in sorted(kinds, key=lambda kind: kind != "train")]
            title = _TITLES.get(name, name) + (f" ({lines[0].name})" if len(lines) == 1 and name == "loss" else "")
            if lines and (picture := line_chart(title, lines, self.metrics.marks)):
                drawn.append(picture)
        return drawn

    def _shares(self) -> list[tuple[str, str, float, str]]:
        """Where the time went: (what, how long, percent, its colour), the most first."""
        whole = self.spent.seconds
        found = sorted(self.spent.shares().items(), key=lambda one: -one[1]) if whole > 0 else []
        return [(name, long_time(x), 100 * x / whole, _COLOURS[name]) for name, x in found if x > 0]


def _changed_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def watch(
    folder: Path, out: Path, every: float, *, once: bool = False, sleep: Callable[[float], None] = time.sleep
) -> RunPage:
    """Write the page into ``out`` whenever there is something new, until the run has finished, or ``once``.

    A run that failed, or was preempted, may be started again: it is watched on. A page that cannot be written is
    written at a later look; :class:`quintnet.LogWarning` says so, the first time.

    Raises:
        OSError: if ``once``, and the page cannot be written.
    """
    failed = False
    shown, refresh = RunPage(folder), 0 if once else max(1, round(every))
    new, written = shown.update(), False
    while True:
        over = once or shown.end == "finished"
        if new or not written:
            try:
                shown.write(out, 0 if over else refresh)
                written = True
            except OSError as error:
                if once:
                    raise
                written = False
                if not failed:
                    failed = True
                    warnings.warn(LogWarning(f"{out} cannot be written ({error}): it is tried again"), stacklevel=2)
        if over:
            return shown
        sleep(every)
        new = shown.update()
