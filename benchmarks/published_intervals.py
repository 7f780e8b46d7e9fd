"""Rows that leave something open: predicted as an interval over what it may have been, and counted apart from errors.

What a blank column may have been: recompute is none, selective, or full of each quarter of the layers; the microbatch,
each divisor of what a data rank has, with as many microbatches as stages or more; pipeline stages per rank (of software
that interleaves), one, or the most that divide the layers. What is predicted to need a fifth more memory than there is
(predictions are that uncertain) is left out, unless all is. A rate whose FLOPs are not known
(``published_flops.py``) is an interval of measured times. Printed by ``published_runs.py``.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from benchmarks.closed_forms.memory import peak_memory
from benchmarks.closed_forms.step_time import StepModel
from benchmarks.published_rows import Row, Run, Unmodelled, run_of, unstated
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.cost_models.hardware import HARDWARE, Hardware
from quintnet_compiler.planner.layouts import divisors

Between = tuple[float, float]
# Of a device's memory: the 90th percentile of errors of predicted memory is a sixth.
FITS = 1.2
QUARTERS = (0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Interval:
    """Seconds of a step, predicted and measured: the least and the most. ``open``: which columns are blank, and
    ``FLOPs`` where it is not known of how many a rate is."""

    id: str
    open: tuple[str, ...]
    completions: int
    predicted: Between
    measured: Between

    @property
    def outside(self) -> float:
        """Return the relative distance of predictions from the measured time.

        Negative if all are too short; 0 if the intervals meet.
        """
        if self.predicted[1] < self.measured[0]:
            return self.predicted[1] / self.measured[0] - 1
        return max(0.0, self.predicted[0] / self.measured[1] - 1)

    @property
    def width(self) -> float:
        """The most that is predicted over the least, less one."""
        return self.predicted[1] / self.predicted[0] - 1


def completions(row: Row) -> Iterator[Run]:
    """The runs that a row may describe, each a way to fill its blank columns.

    Raises:
        Unmodelled: if none of them can be modelled, with the reason for the last.
    """
    open_columns, reason, count = unstated(row), "nothing is left open", 0
    choices = [_choices(row, name) for name in open_columns]
    for values in product(*choices):
        try:
            run = run_of({**row, **dict(zip(open_columns, values, strict=True))})
        except Unmodelled as error:
            reason = str(error)
            continue
        count += 1
        parts = (
            QUARTERS if "recompute" in open_columns and run.layout.recompute == "full" else [run.layout.recompute_share]
        )
        yield from (replace(run, layout=replace(run.layout, recompute_share=part)) for part in parts)
    if not count:
        raise Unmodelled(reason)


def _choices(row: Row, name: str) -> Sequence[str]:
    if name == "recompute":
        return "none", "selective", "full"
    numbers = {each: int(float(row.get(each) or 0)) for each in ("global_batch_seqs", "dp", "pp", "n_layers")}
    if name == "micro_batch_seqs":
        batch, dp = numbers["global_batch_seqs"], numbers["dp"]
        own = batch // dp if batch and dp else 1
        return [str(each) for each in divisors(own) if each == 1 or own // each >= numbers["pp"]]
    layers, pp = numbers["n_layers"], numbers["pp"]
    # the embedding and the head may count as a layer each
    deepest = max(v for v in range(1, layers + 1) if v == 1 or 0 in (layers % (pp * v), (layers + 2) % (pp * v)))
    return [str(each) for each in sorted({1, deepest})]


def interval(row: Row, hardware: Mapping[str, Hardware] = HARDWARE) -> Interval | None:
    """Return the interval of a row with open columns; None if it has none, or no measured time.

    Raises:
        Unmodelled: with the reason, if the row cannot be modelled whatever it may have been.
    """
    predictions: list[tuple[bool, float]] = []
    measured: list[float] = []
    unsure = False
    for run in completions(row):
        unsure |= run.seconds_between is not None
        measured += run.seconds_between or ([run.seconds] if run.seconds else [])
        try:
            cluster = run.cluster(hardware)
            seconds = StepModel(run.model, run.layout, cluster).step().seconds
            fits = peak_memory(run.model, run.layout).allocated <= FITS * cluster.device.memory_bytes
            predictions.append((fits, seconds))
        except CompileError as error:
            reason = error.message
    open_columns = (*unstated(row), *(["FLOPs"] if unsure else []))
    if not open_columns or not measured:
        return None
    if not predictions:
        raise Unmodelled(reason)
    seconds_kept = [seconds for fits, seconds in predictions if fits] or [seconds for _, seconds in predictions]
    return Interval(
        row["id"],
        open_columns,
        len(seconds_kept),
        (min(seconds_kept), max(seconds_kept)),
        (min(measured), max(measured)),
    )


def intervals(rows: Sequence[Row], hardware: Mapping[str, Hardware] = HARDWARE) -> list[Interval]:
    """Return the intervals of all rows that have one."""
    results = []
    for row in rows:
        try:
            results.append(interval(row, hardware))
        except Unmodelled:
            continue
    return [result for result in results if result is not None]


def figures(intervals_: Sequence[Interval]) -> dict[str, dict[str, float]]:
    """Return figures of all intervals, of each source and of each open column.

    They say how many measured times lie within, how wide intervals are, and how far the others are outside.
    """
    of: dict[str, list[Interval]] = defaultdict(list)
    for each in intervals_:
        for name in ("all", f"source {each.id.partition('-')[0]}", *(f"open: {column}" for column in each.open)):
            of[name].append(each)
    return {name: _figures(each) for name, each in sorted(of.items())}


def _figures(group: Sequence[Interval]) -> dict[str, float]:
    outside = [each.outside for each in group]
    return {
        "rows": len(group), "within": sum(not each for each in outside),
        "width_median": statistics.median(each.width for each in group),
        "below": sum(each < 0 for each in outside), "above": sum(each > 0 for each in outside),
        "outside_median": statistics.median([abs(each) for each in outside if each] or [0.0]),
        "outside_max": max(map(abs, outside)),
    }  # fmt: skip
