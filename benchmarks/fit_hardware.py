"""Fit the few efficiencies of one kind of GPU on some published sources; report the held-out ones beside them.

python benchmarks/fit_hardware.py a100-80 --hold-out BLOOM,FMS
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.closed_forms.step_time import StepModel
from benchmarks.published_rows import Run, Unmodelled, read, run_of
from quintnet_compiler.cost_models.hardware import HARDWARE, Efficiency

DATA = Path(__file__).parent / "data"
# Kinds that are one design with another memory share a calibration.
FAMILY = {
    "a100": "a100-80",
    "a100-40": "a100-80",
    "a800": "a100-80",
    "h800": "h100",
    "h200": "h100",
    "gb200": "b200",
    "gb300": "b300",
}
# The share of memory's bandwidth is not fitted: it would stand in for kernels that nobody listed.
BOUNDS = {
    "matmul": (0.4, 0.95), "attention": (0.15, 0.9), "link": (0.3, 0.95),
    "network": (0.2, 0.95), "low_precision": (0.4, 1.0), "host_seconds": (2e-6, 8e-5), "contention": (0.0, 0.8),
}  # fmt: skip


def runs_of(device: str, per_source: int) -> list[Run]:
    """Runs of a family; of a source with many, evenly spread ``per_source``."""
    runs_by_source: dict[str, list[Run]] = defaultdict(list)
    for row in read(DATA / "published_runs.csv") + read(DATA / "published_runs_single_node.csv"):
        try:
            run = run_of(row)
        except Unmodelled:
            continue
        if FAMILY.get(run.device, run.device) == device and run.seconds:
            runs_by_source[run.id.partition("-")[0]].append(run)
    return [r for runs in runs_by_source.values() for r in runs[:: max(1, len(runs) // per_source)]]


def log_errors(runs: Sequence[Run], efficiency: Efficiency) -> np.ndarray:
    """log(predicted / measured) of each run."""
    hardware = {name: replace(device, efficiency=efficiency) for name, device in HARDWARE.items()}
    return np.array(
        [np.log(StepModel(r.model, r.layout, r.cluster(hardware)).step().seconds / (r.seconds or 1)) for r in runs]
    )


def weights(runs: Sequence[Run]) -> np.ndarray:
    """Sources count alike, so that a large one does not speak for all."""
    size: Mapping[str, int] = defaultdict(int)
    for run in runs:
        size[run.id.partition("-")[0]] += 1  # type: ignore[index]
    return np.array([size[run.id.partition("-")[0]] ** -0.5 for run in runs])


def fit(runs: Sequence[Run], start: Efficiency, only: Sequence[str] = ()) -> Efficiency:
    """Least squares on log errors with a robust loss, within physical bounds; of ``only`` these, if any is given."""
    low = any(run.layout.dtype in ("fp8", "fp4") for run in runs)
    names = [name for name in BOUNDS if (low or name != "low_precision") and (not only or name in only)]
    lower, upper = (np.array([BOUNDS[name][side] for name in names]) for side in (0, 1))
    weight = weights(runs)

    def residuals(at: np.ndarray) -> np.ndarray:
        values = lower + at * (upper - lower)
        return weight * log_errors(runs, replace(start, **dict(zip(names, values.tolist(), strict=True))))

    begin = (np.array([asdict(start)[name] for name in names]) - lower) / (upper - lower)
    solution = least_squares(
        residuals, np.clip(begin, 0.01, 0.99), bounds=(0, 1), loss="soft_l1", f_scale=0.08, diff_step=0.01, max_nfev=25
    )
    return replace(start, **dict(zip(names, (lower + solution.x * (upper - lower)).tolist(), strict=True)))


def report(runs: Sequence[Run], efficiency: Efficiency, held: Sequence[str]) -> None:
    errors: dict[str, list[float]] = defaultdict(list)
    for run, error in zip(runs, np.expm1(log_errors(runs, efficiency)), strict=True):
        place = "held out" if run.id.startswith(tuple(held)) else "fitted"
        errors[f"{run.id.partition('-')[0]:8s} {run.layout.dtype:5s} {place:8s}"].append(float(error))
    for name, signed in errors.items():
        size = sorted(map(abs, signed))
        print(
            f"{name} n={len(signed):3d} "
            f"bias {statistics.median(signed):+.3f} mean {statistics.mean(size):.3f} "
            f"median {statistics.median(size):.3f} "
            f"p90 {size[min(len(size) - 1, int(0.9 * len(size)))]:.3f} max {size[-1]:.3f}"
        )


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("device", choices=sorted(set(HARDWARE) - set(FAMILY)))
    options.add_argument("--hold-out", default="", help="comma-separated sources that are not fitted")
    options.add_argument("--per-source", type=int, default=60, help="at most about so many rows of a source")
    options.add_argument("--only", default="", help="comma-separated efficiencies; the others stay as they are")
    args = options.parse_args()
    held = [name for name in args.hold_out.split(",") if name] or ["-"]
    runs = runs_of(args.device, args.per_source)
    used = [run for run in runs if not run.id.startswith(tuple(held))]
    fitted = fit(used, HARDWARE[args.device].efficiency, [name for name in args.only.split(",") if name])
    print("cost", float((weights(used) * np.sqrt(1 + (log_errors(used, fitted) / 0.08) ** 2)).sum()))
    print(", ".join(f"{name}={value:.3g}" for name, value in asdict(fitted).items()))
    report(runs, fitted, held)


if __name__ == "__main__":
    main()
