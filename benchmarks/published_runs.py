"""Predict published training runs and compare: step time and memory, per source and per kind of GPU.

    python benchmarks/published_runs.py                      # the rows in benchmarks/data, as tables
    python benchmarks/published_runs.py --rows FILE.csv --json
    python benchmarks/published_runs.py --worst 10           # and which groups of layouts are ranked worst
    python benchmarks/published_runs.py --fit h100           # calibrate first (see fit_hardware.py)

Errors are (predicted - measured) / measured. A row that cannot be modelled is listed with the reason.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import published_intervals, published_ranking
from benchmarks.closed_forms.memory import peak_memory, stage_memory
from benchmarks.closed_forms.step_time import StepModel
from benchmarks.published_rows import Row, Run, Unmodelled, read, run_of
from benchmarks.published_tables import show
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.cost_models.hardware import GIB, HARDWARE, Hardware

DATA = Path(__file__).parent / "data"
Result = dict[str, Any]


def predicted_gib(run: Run) -> float:
    """Memory as the source measures it: of the last rank or the fullest, allocated or as the device's tools show."""
    if run.last_stage:
        memory = stage_memory(run.model, run.layout, run.layout.pp - 1)
    else:
        memory = peak_memory(run.model, run.layout)
    return (memory.used if run.device_tool else memory.allocated) / GIB


def predict(row: Row, hardware: Mapping[str, Hardware] = HARDWARE) -> Result:
    """One row's result; ``skipped`` is the reason where there is no prediction."""
    result: Result = {
        "id": row["id"], "predicted_step_s": None, "step_time_error": None, "predicted_memory_gib": None,
        "memory_error": None, "skipped": None,
    }  # fmt: skip
    try:
        run = run_of(row)
        result["predicted_step_s"] = StepModel(run.model, run.layout, run.cluster(hardware)).step().seconds
    except Unmodelled as error:
        result["skipped"] = str(error)
        return result
    except CompileError as error:
        result["skipped"] = error.message
        return result
    result["predicted_memory_gib"] = predicted_gib(run)
    if run.seconds:
        result["step_time_error"] = result["predicted_step_s"] / run.seconds - 1
    if run.gib:
        result["memory_error"] = result["predicted_memory_gib"] / run.gib - 1
    return result


def figures(errors: Sequence[float]) -> dict[str, float]:
    """Count, bias (median signed error), and mean, median, p90 and maximum of the absolute errors."""
    size = sorted(map(abs, errors))
    return {
        "rows": len(size), "bias": statistics.median(errors), "mean": statistics.mean(size),
        "median": statistics.median(size), "p90": size[min(len(size) - 1, int(0.9 * len(size)))], "max": size[-1],
    }  # fmt: skip


def _groups(row: Row) -> tuple[str, ...]:
    source, gpu, dtype = row["id"].partition("-")[0], row["gpu_type"].split(" ")[0], row.get("dtype") or "16 bit"
    groups = ["all", f"source {source}", f"GPU {gpu} {dtype}"]
    if gpu.startswith(("A100", "H100")) and dtype in ("bf16", "fp16", "16 bit"):
        groups.append("A100 and H100, 16 bit")
    return tuple(groups)


def summary(
    rows: Sequence[Row], results: Sequence[Result], open_rows: Sequence[published_intervals.Interval] = ()
) -> dict[str, Any]:
    """Figures per group, for step time, for memory, for ranking and for rows that are intervals; how many others were
    skipped, and for what."""
    errors_by_kind: dict[str, dict[str, list[float]]] = {"step_time": defaultdict(list), "memory": defaultdict(list)}
    for row, result in zip(rows, results, strict=True):
        for kind, errors in errors_by_kind.items():
            if result[f"{kind}_error"] is not None:
                for group in _groups(row):
                    errors[group].append(result[f"{kind}_error"])
    intervals = {each.id for each in open_rows}
    skipped_results = [result for result in results if result["skipped"] and result["id"] not in intervals]
    skipped = Counter(f"{result['id'].partition('-')[0]}: {result['skipped']}" for result in skipped_results)
    return {
        **{kind: {group: figures(e) for group, e in errors.items()} for kind, errors in errors_by_kind.items()},
        "ranking": published_ranking.figures(ranked(rows, results)),
        "intervals": published_intervals.figures(open_rows), "skipped": dict(skipped),
    }  # fmt: skip


def ranked(rows: Sequence[Row], results: Sequence[Result]) -> list[published_ranking.Group]:
    """Groups of rows that differ in their layouts alone."""
    return published_ranking.groups(
        (row, run_of(row), result["predicted_step_s"])
        for row, result in zip(rows, results, strict=True)
        if result["step_time_error"] is not None
    )


def calibrated(device: str) -> dict[str, Hardware]:
    """All hardware, with ``device``'s family fitted to the repository's rows."""
    from benchmarks.fit_hardware import FAMILY, fit, runs_of

    efficiency = fit(runs_of(FAMILY.get(device, device), 40), HARDWARE[device].efficiency)
    print(efficiency, file=sys.stderr)
    family = FAMILY.get(device, device)
    return {n: replace(h, efficiency=efficiency) if FAMILY.get(n, n) == family else h for n, h in HARDWARE.items()}


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--rows", type=Path, nargs="+", help="CSV files (default: those in benchmarks/data)")
    options.add_argument("--json", action="store_true", help="print JSON and nothing else")
    options.add_argument("--markdown", action="store_true", help="print tables in Markdown")
    options.add_argument(
        "--worst", type=int, default=0, metavar="N", help="list the N groups that are ranked worst, too"
    )
    options.add_argument("--fit", metavar="GPU", choices=sorted(HARDWARE), help="calibrate this kind of GPU first")
    args = options.parse_args()
    files = args.rows or [DATA / "published_runs.csv", DATA / "published_runs_single_node.csv"]
    rows = [row for file in files for row in read(file)]
    hardware = calibrated(args.fit) if args.fit else HARDWARE
    results = [predict(row, hardware) for row in rows]
    open_rows = published_intervals.intervals(rows, hardware)
    total = summary(rows, results, open_rows)
    if args.json:
        print(json.dumps({"rows": results, "intervals": list(map(vars, open_rows)), "summary": total}, indent=1))
        return
    show(total, markdown=args.markdown)
    for group in published_ranking.worst(ranked(rows, results), args.worst):
        print(json.dumps(group))


if __name__ == "__main__":
    main()
