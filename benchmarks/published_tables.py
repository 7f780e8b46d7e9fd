"""Tables of what ``published_runs.py`` found, for a terminal or, as Markdown, for ``docs/cost_accuracy.md``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sheet:
    """A table: its title, its columns, and its rows of text."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        return (
            "\n".join(f"| {' | '.join(line)} |" for line in lines).replace("| --- ", "|---").replace("|--- |", "|---|")
        )


def sheets(total: Mapping[str, Any]) -> Iterator[Sheet]:
    """All tables of a summary."""
    for kind, title in (("step_time", "step time"), ("memory", "memory")):
        rows = [_errors(group, group_figures) for group, group_figures in sorted(total[kind].items())]
        yield Sheet(f"error of {title}", (title, "rows", *ERRORS), tuple(rows))
    yield Sheet("ranking of layouts", ("ranking", *RANKING), tuple(_ranking(n, f) for n, f in total["ranking"].items()))
    yield Sheet("rows that leave something open", ("open rows", *INTERVALS),
                tuple(_interval(n, f) for n, f in total["intervals"].items()))  # fmt: skip
    yield Sheet("not modelled, and why", ("not modelled, and why", "rows"),
                tuple((reason, str(count)) for reason, count in total["skipped"].items()))  # fmt: skip


ERRORS = ("bias %", "mean %", "median %", "p90 %", "max %")


def _errors(group: str, group_figures: Mapping[str, float]) -> tuple[str, ...]:
    sizes = (_percent(group_figures[name]) for name in ("mean", "median", "p90", "max"))
    return group, str(group_figures["rows"]), f"{100 * group_figures['bias']:+.1f}", *sizes


RANKING = (
    "groups", "layouts", "ties", "correlation", "pairs", "rightly %",
    "regret mean %", "median %", "worst %", "random %",
)  # fmt: skip


def _ranking(group: str, group_figures: Mapping[str, float]) -> tuple[str, ...]:
    counts = (str(group_figures[name]) for name in ("groups", "layouts", "ties"))
    rates = (_percent(group_figures[f"regret_{name}"]) for name in ("mean", "median", "worst", "random"))
    right = group_figures["correlation"], group_figures["pairs"], group_figures["pairs_right"]
    return group, *counts, _number(right[0]), str(right[1]), _percent(right[2]), *rates


INTERVALS = ("rows", "within", "width, median %", "too short", "too long", "outside, median %", "outside, max %")


def _interval(group: str, group_figures: Mapping[str, float]) -> tuple[str, ...]:
    counts = [str(group_figures[name]) for name in ("rows", "within", "below", "above")]
    sizes = [_percent(group_figures[name]) for name in ("width_median", "outside_median", "outside_max")]
    return group, counts[0], counts[1], sizes[0], counts[2], counts[3], sizes[1], sizes[2]


def _percent(share: float) -> str:
    return _number(100 * share, 1)


def _number(value: float, digits: int = 2) -> str:
    return f"{value:.{digits}f}" if value == value else "-"  # not a number where a group has too few


def show(total: Mapping[str, Any], *, markdown: bool) -> None:
    """Print all tables."""
    if markdown:
        print("\n\n".join(sheet.markdown() for sheet in sheets(total)))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console()
    for sheet in sheets(total):
        table = Table(*sheet.columns, title=sheet.title)
        for row in sheet.rows:
            table.add_row(*row)
        console.print(table)
