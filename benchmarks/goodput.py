"""Goodput of a long run on many GPUs, with and without what keeps failures cheap: a simulation of its events.

    python benchmarks/goodput.py [--gpus 10000] [--days 30] [--seeds 200] [--save 60] [--restart 900] [--json]

Goodput is the share of wall time that is training whose result is kept. Failures, and interruptions that are announced,
are Poisson processes with the rates of Llama 3's pre-training ("The Llama 3 Herd of Models", arXiv:2407.21783, section
3.3.4): 419 unexpected and 47 planned ones in 54 days on 16,384 GPUs, here in proportion to the number of GPUs. How long
a save and a restart take is given, not measured.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from quintnet_compiler.cost_models.checkpoint_interval import daly_interval

DAY = 86400.0
GPU_DAYS = 54 * 16384  # of the published run
UNEXPECTED, PLANNED = 419 / GPU_DAYS, 47 / GPU_DAYS  # in a GPU-day


@dataclass(frozen=True)
class Run:
    """A way to train. All times in seconds.

    ``between_failures`` and ``between_notices``: means (inf: never); a notice says that the run must end soon.
    ``interval``: training between saves; ``save``: until one is on the disk; ``stall``: how long of it training waits;
    ``restart``: from a fault to the first step; ``heeds``: whether a notice makes the run save before it ends.
    """

    between_failures: float
    between_notices: float
    interval: float
    save: float
    stall: float
    restart: float
    heeds: bool


def simulate(run: Run, seconds: float, dice: random.Random) -> dict[str, float]:
    """Return where ``seconds`` of wall time go: ``kept`` or ``lost`` training, ``stalled`` by saves, ``restarting``."""
    spent = defaultdict[str, float](float)
    at = 0.0  # wall time
    safe = done = 0.0  # training on the disk, and in memory
    writing: tuple[float, float] | None = None  # until when, and how much training it has
    fault = _after(run.between_failures, dice)
    notice = _after(run.between_notices, dice)

    def go(kind: str, length: float) -> bool:
        """Until it ends, or the next event, or the end of the simulation: whether it was whole."""
        nonlocal at, done, safe, writing
        end = min(at + length, fault, notice, seconds)
        if writing is not None and writing[0] <= end:
            safe, writing = writing[1], None
        spent[kind] += end - at
        if kind == "training":
            done += end - at
        whole, at = end == at + length, end
        return whole

    while at < seconds:
        ready = go("training", run.interval) and (writing is None or go("stalled", writing[0] - at))
        if ready and go("stalled", run.stall):
            writing = at + run.save - run.stall, done
            go("stalled", 0.0)  # it may be on the disk by now
        while at < seconds and at in (fault, notice):
            heeded = at == notice and run.heeds
            if heeded and at != fault and done > safe:
                notice = math.inf  # nothing but a fault ends the save
                if go("stalled", run.save):
                    safe = done
            spent["lost"] += done - safe
            done, writing = safe, None
            fault = at + _after(run.between_failures, dice) if at >= fault else fault
            notice = at + _after(run.between_notices, dice) if at >= notice or notice == math.inf else notice
            go("restarting", run.restart)
    spent["kept"] = spent.pop("training") - spent["lost"]
    return spent


def _after(mean: float, dice: random.Random) -> float:
    return math.inf if mean == math.inf else dice.expovariate(1 / mean)


FEATURES = ("interval", "preemption save", "async save", "quick restart")


def made(base: Run, features: tuple[str, ...], quick: float) -> Run:
    """``base`` with these features; ``quick``: seconds of a quick restart."""
    run = base
    if "preemption save" in features:
        run = replace(run, heeds=True)
    if "async save" in features:
        run = replace(run, stall=base.save / 20)
    if "quick restart" in features:
        run = replace(run, restart=quick)
    if "interval" in features:
        losing = 1 / base.between_failures + (0 if run.heeds else 1 / base.between_notices)
        run = replace(run, interval=max(daly_interval(run.stall, 1 / losing), run.save))
    return run


def average(run: Run, seconds: float, seeds: int) -> dict[str, float]:
    """Means over seeds, in shares of the time; ``error``: the standard error of what is kept."""
    simulations = [simulate(run, seconds, random.Random(seed)) for seed in range(seeds)]
    shares = {kind: statistics.fmean(simulation[kind] for simulation in simulations) / seconds for kind in KINDS}
    error = (
        statistics.stdev(simulation["kept"] for simulation in simulations) / seconds / math.sqrt(seeds)
        if seeds > 1
        else 0.0
    )
    return {**shares, "error": error, "interval": run.interval}


KINDS = ("kept", "lost", "stalled", "restarting")


def table(rows: Mapping[str, Mapping[str, float]]) -> str:
    lines = ["| | goodput | lost | waiting for saves | restarts | s between saves |", "|---|---|---|---|---|---|"]
    for name, row in rows.items():
        shares = " | ".join(f"{row[kind]:.1%}" for kind in KINDS[1:])
        lines.append(f"| {name} | {row['kept']:.2%} ± {row['error']:.2%} | {shares} | {row['interval']:,.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--gpus", type=int, default=10_000)
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--seeds", type=int, default=200, help="runs of each row")
    parser.add_argument("--save", type=float, default=60.0, help="seconds of a save: 405B with Adam, at 100 GB/s")
    parser.add_argument("--every", type=float, default=3600.0, help="seconds between saves without the feature")
    parser.add_argument("--restart", type=float, default=900.0, help="seconds from a fault to the first step")
    parser.add_argument("--quick", type=float, default=180.0, help="the same of a quick restart")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    failures, notices = (DAY / (rate * args.gpus) for rate in (UNEXPECTED, PLANNED))
    base = Run(failures, notices, args.every, args.save, args.save, args.restart, heeds=False)
    chosen = {"nothing": (), **{f"only {feature}": (feature,) for feature in FEATURES}, "all": FEATURES}
    chosen |= {f"all but {feature}": tuple(x for x in FEATURES if x != feature) for feature in FEATURES}
    rows = {n: average(made(base, features, args.quick), args.days * DAY, args.seeds) for n, features in chosen.items()}
    if args.json:
        print(json.dumps({"between_failures": failures, "between_notices": notices, "rows": rows}, indent=1))
        return
    print(f"{args.gpus:,} GPUs, {args.days:g} days: a failure in {failures / 3600:.2f} h, ", end="")
    print(f"a notice in {notices / 3600:.1f} h; means of {args.seeds} runs\n\n{table(rows)}")


if __name__ == "__main__":
    main()
