"""Schedules as text."""

from __future__ import annotations

from collections.abc import Iterable

from .schedule import Schedule, StageEdge, bubble, chain, earliest_spans


def grid(schedule: Schedule, edges: Iterable[StageEdge] | None = None) -> str:
    """Return the compute actions as text: a row per rank, a column per unit of time, every action one unit long.

    Transfers take no time and are not shown. ``edges`` are those of a plain pipeline by default. The header
    has the bubble of :func:`bubble`, where a backward takes as long as two forwards.

    Raises:
        ScheduleError: QN208 when some action can never start.

    >>> from .kinds import gpipe
    >>> print(gpipe(2, 3))
    gpipe: stages 2, microbatches 3, bubble 25.0%
    rank 0  F0 F1 F2 .  .  B0 B1 B2
    rank 1  .  F0 F1 F2 B0 B1 B2 .
    """
    edges = chain(schedule.num_stages) if edges is None else tuple(edges)
    header = f"{schedule.name}: stages {schedule.num_stages}, microbatches {schedule.num_microbatches}"
    # Stages are not named where no rank has two.
    alone = len(set(schedule.placement)) == schedule.num_stages
    rows: list[dict[int, str]] = []
    for line in earliest_spans(schedule, edges, lambda action: 1.0):
        names = [str(action).removeprefix(str(action.stage) if alone else "") for _, _, action in line]
        rows.append({int(span.start): name for span, name in zip(line, names, strict=True)})
    columns = range(1 + max(column for row in rows for column in row))
    width = max(len(cell) for row in rows for cell in row.values())
    label = len(f"rank {schedule.num_ranks - 1}")
    lines = [f"{header}, bubble {bubble(schedule, edges):.1%}"]
    for rank, row in enumerate(rows):
        cells = " ".join(row.get(column, ".").ljust(width) for column in columns)
        lines.append(f"{f'rank {rank}'.ljust(label)}  {cells}".rstrip())
    return "\n".join(lines)
