"""Plans for well-known models beside the layouts that were published or are usual for them; what planning takes.

    python benchmarks/plan_large.py                 # every model, a table
    python benchmarks/plan_large.py --set usual     # one of the sets of planned_models.py: published, usual, nets
    python benchmarks/plan_large.py --only 405B --json
    python benchmarks/plan_large.py --scaling docs/planning_time.svg   # Llama-3 405B on 512 to 16,384 GPUs

Every plan is made from the real module on the meta device, in a process of its own with one thread. Both step times
are predictions of the same cost model; what was measured stands beside them where it was published. Planning is
counted in seconds of the processor, so that other work on the machine does not matter.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import quintnet
from benchmarks.planned_models import CASES, SETS


def plan_one(name: str, gpus: int | None, seconds: float) -> dict[str, Any]:
    """Plan one case in this process."""
    torch.set_num_threads(1)
    case = CASES[name]
    devices = gpus or case.gpus
    cluster = quintnet.Cluster(case.device, nodes=-(-devices // 8), gpus_per_node=min(8, devices))
    started = time.process_time()
    model, batch, decided = case.model(), case.batch(), case.decided
    report = quintnet.plan(model, cluster, batch, loss_fn=case.loss, plan=decided or None, seconds=seconds)
    took, peak = time.process_time() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    best = report.found.ranked[0]
    result: dict[str, Any] = {
        "model": name, "cluster": f"{devices} {case.device}", "gpus": devices, "cpu_seconds": took, "gib": peak,
        "ended": report.found.ended, "gap": report.found.gap, **_priced("planned", best),
        "measured_s": case.measured, "source": case.source,
        "simpler": str(report.simpler[0].layout) if report.simpler else None,
    }  # fmt: skip
    if gpus is None:
        try:
            usual = {**decided, **case.published}
            result |= _priced("published", quintnet.estimate(model, cluster, batch, usual, loss_fn=case.loss))
        except quintnet.CompileError as error:
            result |= {"published": str(error), "published_s": None, "published_gib": None}
    return result


def _priced(prefix: str, candidate: Any) -> dict[str, Any]:
    return {
        prefix: str(candidate.layout),
        f"{prefix}_s": candidate.seconds,
        f"{prefix}_gib": candidate.memory_bytes / 2**30,
        f"{prefix}_waits": candidate.exposed / candidate.seconds,
        f"{prefix}_bubble": candidate.bubble / candidate.seconds,
    }


def _run(name: str, gpus: int | None, seconds: float) -> dict[str, Any]:
    command = [sys.executable, __file__, "--one", name, "--seconds", str(seconds)]
    command += ["--gpus", str(gpus)] if gpus else []
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def scaling(path: Path, seconds: float) -> list[dict[str, Any]]:
    """Planning time of Llama-3 405B over the number of GPUs, and a picture of it."""
    results = [_run("Llama-3 405B", gpus, seconds) for gpus in (512, 1024, 2048, 4096, 8192, 16384)]
    points = [(60 + 84 * i, 220 - 180 * result["cpu_seconds"] / 60) for i, result in enumerate(results)]
    line = " ".join(f"{x:.0f},{y:.1f}" for x, y in points)
    marks = "".join(
        f'<circle cx="{x:.0f}" cy="{y:.1f}" r="4" fill="#1f77b4"/>'
        f'<text x="{x:.0f}" y="{y - 10:.1f}" text-anchor="middle">{result["cpu_seconds"]:.0f} s</text>'
        f'<text x="{x:.0f}" y="240" text-anchor="middle">{result["gpus"]}</text>'
        for (x, y), result in zip(points, results, strict=True)
    )
    path.write_text(
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 540 275" font-family="sans-serif" font-size="12">'
        '<rect width="540" height="275" fill="white"/>'
        '<path d="M40 40 V220 H520" fill="none" stroke="#888"/><path d="M40 40 H520" stroke="#ccc"/>'
        f'<text x="36" y="44" text-anchor="end">60 s</text><polyline points="{line}" fill="none" stroke="#1f77b4"/>'
        f'{marks}<text x="280" y="265" text-anchor="middle">GPUs (Llama-3 405B, H100)</text></svg>\n'
    )
    return results


def show(results: list[dict[str, Any]]) -> None:
    for result in results:
        gap = "" if result["ended"] == "proof" else f", leaves {result['gap']:.0%}"
        print(
            f"{result['model']} on {result['cluster']}: {result['cpu_seconds']:.0f} CPU s, {result['gib']:.1f} GiB; ",
            end="",
        )
        print(f"ended by {result['ended']}{gap}")
        _line("planned", result)
        if result["simpler"]:
            print(f"  simpler    {result['simpler']}")
        if result.get("published_s"):
            _line("published", result)
            measured = f"measured {result['measured_s']:.2f} s; " if result["measured_s"] else ""
            print(f"             {measured}{result['source']}")
        elif "published" in result:
            print(f"  published: {result['published']}")


def _line(word: str, result: dict[str, Any]) -> None:
    waits, bubble = result[f"{word}_waits"], result[f"{word}_bubble"]
    print(f"  {word:<9} {result[f'{word}_s']:9.3f} s {result[f'{word}_gib']:6.1f} GiB  {result[word]}", end="")
    print(f"; communication {waits:.0%}, bubble {bubble:.0%}")


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--only", default="", help="models whose name has this in it")
    options.add_argument("--set", choices=SETS, help="the models of one set")
    options.add_argument("--json", action="store_true", help="print JSON and nothing else")
    options.add_argument("--seconds", type=float, default=300.0, help="by the clock, to search at most")
    options.add_argument("--scaling", type=Path, help="write a picture of the planning time over the number of GPUs")
    options.add_argument("--one", help=argparse.SUPPRESS)
    options.add_argument("--gpus", type=int, help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.one:
        print(json.dumps(plan_one(args.one, args.gpus, args.seconds)))
        return
    if args.scaling:
        results = scaling(args.scaling, args.seconds)
    else:
        results = []
        for name in SETS[args.set] if args.set else CASES:
            if args.only in name:
                results.append(_run(name, None, args.seconds))
                print(json.dumps(results[-1]), file=sys.stderr)
    if args.json:
        print(json.dumps(results, indent=1))
    else:
        show(results)


if __name__ == "__main__":
    main()
