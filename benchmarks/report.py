"""Command line, statistics and output that the benchmarks share."""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from typing import Any, Literal

import torch
from harness import WARMUP, Builder, Job, RankResult, measure
from models import SIZES

ROUNDS = {"tiny": 60, "small": 30, "medium": 8}


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark takes."""
    options = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    options.add_argument("--size", choices=SIZES, default="tiny")
    options.add_argument("--rounds", type=int, help="timed steps of each peer (default: by size)")
    options.add_argument("--rows", type=int, help="sequences in the global batch")
    options.add_argument("--peers", help="comma-separated names (default: all)")
    options.add_argument("--timeout", type=float, default=600.0, help="seconds until a run is ended")
    options.add_argument("--json", action="store_true", help="print JSON and nothing else")
    return options


def choose(builders: Mapping[str, Builder], names: str | None) -> dict[str, Builder]:
    """The builders of the named peers; without names all."""
    wanted = list(builders) if names is None else names.split(",")
    if unknown := [name for name in wanted if name not in builders]:
        sys.exit(f"unknown peer {', '.join(unknown)}: there are {', '.join(builders)}")
    return {name: builders[name] for name in wanted}


def main(jobs: Mapping[str, Job], settings: Mapping[str, Any], as_json: bool) -> None:
    """Measure, print, and exit; with status 1 if any peer failed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # an exception, so that the ranks are ended too
    reports = []
    for title, job in jobs.items():
        reports.append(_report(title, job, settings))
        if not as_json:
            print(_table(reports[-1]), flush=True)
    if as_json:
        print(json.dumps(reports, indent=2))
    sys.exit(1 if any(report["errors"] for report in reports) else 0)


def _report(title: str, job: Job, settings: Mapping[str, Any]) -> dict[str, Any]:
    ranks, errors = measure(job)
    names = [name for name in job.builders if name not in errors]
    return {
        "benchmark": title,
        **settings,
        "ranks": job.ranks,
        "model": asdict(job.size),
        "rows": job.rows,
        "rounds": job.rounds,
        "warmup": WARMUP,
        "torch": torch.__version__,
        "peers": {name: _summary(name, ranks) for name in names},
        "ratios": _ratios(names, ranks),
        "foreign_cores": _foreign_cores(ranks),
        "errors": errors,
    }


# -- statistics


def _quartiles(values: Sequence[float]) -> list[float]:
    """First quartile, median, third quartile."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3


def _slowest(name: str, ranks: Sequence[RankResult], clock: Literal["wall", "cpu"] = "wall") -> list[float]:
    """Each round's step time: a step is over when its last rank is done."""
    return [max(times) for times in zip(*(getattr(rank, clock)[name] for rank in ranks), strict=True)]


def _summary(name: str, ranks: Sequence[RankResult]) -> dict[str, Any]:
    low, median, high = (1e3 * seconds for seconds in _quartiles(_slowest(name, ranks)))
    return {
        "median_ms": median,
        "quartiles_ms": [low, high],
        "rank_median_ms": [1e3 * statistics.median(rank.wall[name]) for rank in ranks],
        "rank_median_cpu_ms": [1e3 * statistics.median(rank.cpu[name]) for rank in ranks],
        "rank_resident_bytes": [rank.resident[name] for rank in ranks],
        "rank_peak_bytes": [rank.peak[name] for rank in ranks],
        "rank_code_bytes": [rank.code[name] for rank in ranks],
        "sent_bytes": ranks[0].wire[name],
        "loss": next(rank.losses[name][0] for rank in ranks if rank.losses[name]),
        "loss_error": max(rank.checks[name].loss for rank in ranks),
        "gradient_error": max(rank.checks[name].gradients for rank in ranks),
    }


def _ratios(names: Sequence[str], ranks: Sequence[RankResult]) -> dict[str, Any]:
    """Return quartiles over rounds of one peer's time divided by another's in the same round, for every two.

    Also of CPU time, the busier rank's: it hardly depends on what else runs, but waiting costs nothing in it.
    """
    ratios = {}
    for peer, other in combinations(names, 2):
        low, median, high = _paired(_slowest(peer, ranks), _slowest(other, ranks))
        cpu = _paired(_slowest(peer, ranks, "cpu"), _slowest(other, ranks, "cpu"))
        ratios[f"{peer}/{other}"] = {"median": median, "quartiles": [low, high], "cpu_median": cpu[1]}
    return ratios


def _paired(times: Sequence[float], others: Sequence[float]) -> list[float]:
    return _quartiles([a / b for a, b in zip(times, others, strict=True)])


def _foreign_cores(ranks: Sequence[RankResult]) -> float | None:
    """Return how many cores other processes kept busy during the steps: the more, the less wall times mean."""
    if not ranks or ranks[0].machine_cpu is None:
        return None
    return max(0.0, ranks[0].machine_cpu - sum(rank.own_cpu for rank in ranks)) / ranks[0].elapsed


# -- for people


def _table(report: Mapping[str, Any]) -> str:
    lines = [
        f"{report['benchmark']} on {report['ranks']} processes, {report['size']}: {report['rows']} x "
        f"{report['model']['sequence']} tokens, {report['rounds']} rounds",
        f"{'peer':<12}{'ms/step':>10}{'quartiles':>20}{'cpu ms/rank':>13}"
        f"{'kept MB':>9}{'step MB':>9}{'code MB':>9}{'sent MB':>9}{'loss':>10}{'loss err':>10}{'grad err':>10}",
    ]
    for name, row in report["peers"].items():
        low, high = row["quartiles_ms"]
        lines.append(
            f"{name:<12}{row['median_ms']:>10.2f}{f'{low:.2f} – {high:.2f}':>20}"
            f"{max(row['rank_median_cpu_ms']):>13.2f}{max(row['rank_resident_bytes']) / 1e6:>9.2f}"
            f"{max(row['rank_peak_bytes']) / 1e6:>9.2f}{max(row['rank_code_bytes']) / 1e6:>9.2f}"
            f"{(row['sent_bytes'] or 0) / 1e6:>9.2f}{row['loss']:>10.5f}"
            f"{row['loss_error']:>10.1e}{row['gradient_error']:>10.1e}"
        )
    lines.append("paired by round: median (quartiles); of CPU time")
    for pair, row in report["ratios"].items():
        low, high = row["quartiles"]
        lines.append(f"{pair:<20}{row['median']:.3f} ({low:.3f} – {high:.3f}); {row['cpu_median']:.3f}")
    if report["foreign_cores"] is not None:
        lines.append(f"other processes kept {report['foreign_cores']:.2f} cores busy")
    for name, error in report["errors"].items():
        lines += [f"{name} FAILED:", error.rstrip()]
    return "\n".join(lines)
