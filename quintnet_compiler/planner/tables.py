"""Estimates as rows of a table."""

from __future__ import annotations

from collections.abc import Sequence

from .estimate import Estimate, bytes_of, time_of
from .workload import rounded


def cells_of(estimates: Sequence[Estimate]) -> list[tuple[str, ...]]:
    """Estimates of one workload as rows of a table, below a row of names."""
    first = estimates[0]
    head = ["step", "memory", "bubble", "exposed"]
    if first.workload:
        head += [f"{first.figures.unit}s/s/device", "MFU", *(["per million"] if first.figures.cost_per_million else [])]
    rows = [(*head, "layout")]
    for one in estimates:
        cells = [time_of(one.seconds), bytes_of(one.memory_bytes)]
        cells += [f"{one.bubble / one.seconds:.1%}", f"{one.exposed / one.seconds:.1%}"]
        if one.workload:
            found = one.figures
            cells += [rounded(found.per_second_per_device), found.share]
            cells += [rounded(found.cost_per_million)] if found.cost_per_million else []
        rows.append((*cells, str(one.layout)))
    return rows


def aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as lines; their last cells are as long as they are."""
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    return ["  ".join([*map(str.rjust, row[:-1], widths), row[-1]]) for row in rows]
