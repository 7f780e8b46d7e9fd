"""A run as a page: its numbers over steps, the last measured step, and where the time went."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ..core import html
from ..core.errors import CompileError, LogWarning
from ..core.files import naming, replace_file
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
    """A page about the run in ``folder``, a Trainer's log_folder. ``update()`` reads new lines.

    ``html()`` is a self-contained page; a notebook shows the same.
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
        """Read what is new, and return whether there was something."""
        changed = self.metrics.read()
        seen = tuple(_changed_at(self.folder / name) for name in (TIMELINE, "time.json"))
        if seen != self._seen:
            changed, self._seen = True, seen
            with contextlib.suppress(CompileError, OSError):  # being written, or damaged: keep the old one
                self.timeline = Timeline.load(self.folder / TIMELINE) if seen[0] else None
            with contextlib.suppress(CompileError):
                self.spent = RunTime.read(self.folder)
        return changed

    @property
    def end(self) -> str:
        """Return how the newest start of the run ended: ``"finished"``, ``"preempted"``, ``"failed"``.

        ``""``: it runs, or was killed.
        """
        return self.spent.starts[-1].end if self.spent.starts else ""

    def html(self, refresh: int = 0) -> str:
        """Return the page. ``refresh``: seconds after which a browser loads it again."""
        return html.page("quintnet_compiler.training", "run_page.html.jinja", refresh=refresh, **self._values())

    def _repr_html_(self) -> str:
        self.update()
        return html.figure("quintnet_compiler.training", "run.html.jinja", **self._values())

    def write(self, path: Path, refresh: int = 0) -> None:
        """Replace ``path`` by the page at once, so that no browser reads a half of it. No link is written through."""
        with naming(path):
            path.parent.stat()  # it may be gone: folders are not made here
        replace_file(path, self.html(refresh))

    def _values(self) -> dict[str, Any]:
        # pictures are escaped by their own templates
        return {
            "title": self.folder.resolve().name, "cards_shown": self._cards(), "state": self._state(),
            "notes": self._notes(), "charts": [Markup(chart) for chart in self._charts()],
            "timeline": self.timeline, "duration": duration,
            "picture": Markup(figure_svg(self.timeline)) if self.timeline is not None else "", "shares": self._shares(),
        }  # fmt: skip

    def _cards(self) -> list[tuple[str, str]]:
        metrics, cards = self.metrics, list[tuple[str, str]]()
        if metrics.step is not None:
            cards.append(("step", f"{metrics.step:,}"))
        for key in (("train", "loss"), ("validation", "loss")):
            if key in metrics.newest:
                cards.append((f"{'validation ' * (key[0] != 'train')}loss", f"{metrics.newest[key]:.4g}"))
        for name in ("tokens_per_second", "rows_per_second", "memory_gib", "mfu"):
            if (x := metrics.newest.get(("train", name))) is not None:
                cards.append((_TITLES[name], f"{x:.1%}" if name == "mfu" else short(x)))
        if metrics.began is not None and metrics.until is not None:
            cards.append(("from first to last line", long_time(metrics.until - metrics.began)))
        return cards

    def _state(self) -> str:
        metrics, now = self.metrics, self.clock()
        if metrics.until is None:
            return "no line of metrics.jsonl yet"
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(metrics.until))
        starts = len(self.spent.starts)
        started = f"start {starts}, " if starts > 1 else ""
        if self.end:
            return f"{started}{self.end}; the last line is of {at}"
        silent = (
            f", {long_time(now - metrics.until)} ago: it may have been killed" if now - metrics.until > _QUIET else ""
        )
        return f"{started}running; the last line is of {at}{silent}"

    def _notes(self) -> list[str]:
        metrics = self.metrics
        notes = [text for _, text in metrics.marks[-5:]]
        more = len(metrics.marks) - len(notes)
        notes = [*([f"{more} restarts before"] if more else []), *notes]
        notes += [f"{metrics.unreadable} of {metrics.lines} lines could not be read"] if metrics.unreadable else []
        notes += [f"values of further names are left out: {metrics.left_out}"] if metrics.left_out else []
        return notes

    def _charts(self) -> list[str]:
        curves, drawn = self.metrics.curves, list[str]()
        names = list(dict.fromkeys([*_TITLES, *(name for _, name in curves)]))
        for name in names:
            kinds = [kind for kind, curve_name in curves if curve_name == name]
            lines = [Line(kind, curves[kind, name].spans) for kind in sorted(kinds, key=lambda kind: kind != "train")]
            title = _TITLES.get(name, name) + (f" ({lines[0].name})" if len(lines) == 1 and name == "loss" else "")
            if lines and (picture := line_chart(title, lines, self.metrics.marks)):
                drawn.append(picture)
        return drawn

    def _shares(self) -> list[tuple[str, str, float, str]]:
        """Return where the time went, longest first: (kind, duration, percent, colour)."""
        whole = self.spent.seconds
        shares = sorted(self.spent.shares().items(), key=lambda item: -item[1]) if whole > 0 else []
        return [(name, long_time(x), 100 * x / whole, _COLOURS[name]) for name, x in shares if x > 0]


def _changed_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def watch(
    folder: Path, out: Path, every: float, *, once: bool = False, sleep: Callable[[float], None] = time.sleep
) -> RunPage:
    """Write the page to ``out`` whenever there is something new, until the run has finished, or ``once``.

    A run that failed or was preempted may be started again, and is watched on. A page that cannot be written is tried
    again later, with a :class:`quintnet.LogWarning` the first time.

    Raises:
        OSError, CompileError: if ``once``, and the page cannot be written; QN701 if a folder has its name.
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
            except (OSError, CompileError) as error:
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
