"""One rank's training step with ``backend="inductor"`` against the generated Python, and against torch's own two.

python benchmarks/inductor.py [--size tiny|small|medium] [--rows N] [--rounds N] [--json]

The Llama of models.py, float32, one thread, in CPU time: with one thread that is the step, whatever else the machine
does. All sides alternate step by step, and ratios are paired by round. The first step of each side, which compiles, is
timed apart, by the clock. Gradients are compared with the plain model's before anything counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from models import SIZES, Batch, Llama, build_model, loss_fn, make_batch
from torch import nn

import quintnet

TOLERANCE = 1e-4  # float32, sums in another order
ROUNDS = {"tiny": 100, "small": 30, "medium": 8}

Side = tuple[Callable[[], object], Callable[[], Iterator[tuple[str, nn.Parameter]]]]


def _ours(model: Llama, batch: Batch, backend: str) -> Side:
    program = quintnet.compile(model, quintnet.Mesh(dp=1), batch, loss_fn=loss_fn, backend=backend)  # type: ignore[arg-type]
    return lambda: program.step(batch), program.named_parameters


def _torchs(model: Llama, batch: Batch, *, compiled: bool) -> Side:
    def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return loss_fn(model(tokens), targets)

    run = torch.compile(step) if compiled else step
    return lambda: run(*batch).backward(), model.named_parameters


def _seconds(side: Side, clock: Callable[[], float] = time.process_time) -> float:
    for _, parameter in side[1]():
        parameter.grad = None
    start = clock()
    side[0]()
    return clock() - start


def _gradients(side: Side) -> dict[str, torch.Tensor]:
    gradients = {name: p.grad for name, p in side[1]() if p.grad is not None}
    return {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in gradients.items()}


def measure(size: str, rows: int, rounds: int) -> dict[str, float]:
    """Milliseconds of each side, seconds of its first step, and ratios."""
    torch.set_num_threads(1)
    batch = make_batch(SIZES[size], rows, 0)
    sides = {
        "eager": _ours(build_model(SIZES[size]), batch, "eager"),
        "inductor": _ours(build_model(SIZES[size]), batch, "inductor"),
        "torch": _torchs(build_model(SIZES[size]), batch, compiled=False),
        "torch.compile": _torchs(build_model(SIZES[size]), batch, compiled=True),
    }
    report = {f"s, first step, {name}": _seconds(side, time.perf_counter) for name, side in sides.items()}
    expected = _gradients(sides["torch"])
    floor = 1e-3 * max(float(x.abs().max()) for x in expected.values())
    for name, side in sides.items():
        computed = _gradients(side)
        worst = 0.0
        for key, want in expected.items():
            error = float((computed[key] - want).abs().max()) / max(float(want.abs().max()), floor)
            if not error <= TOLERANCE:
                raise AssertionError(f"{name}: the gradient of {key} is off by {error:.1e}")
            worst = max(worst, error)
        report[f"gradient error, {name}"] = worst
    times: dict[str, list[float]] = {name: [] for name in sides}
    for index in range(rounds + 2):  # two to warm up
        for name, side in sides.items():
            seconds = _seconds(side)
            if index > 1:
                times[name].append(seconds)
    report |= {f"ms, {name}": 1e3 * statistics.median(computed) for name, computed in times.items()}
    for peer, other in (("inductor", "eager"), ("inductor", "torch.compile"), ("torch.compile", "torch")):
        pairs = zip(times[peer], times[other], strict=True)
        report[f"{peer}/{other}"] = statistics.median(a / b for a, b in pairs)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    report = measure(args.size, args.rows, args.rounds or ROUNDS[args.size])
    print(json.dumps(report, indent=2) if args.json else "\n".join(f"{k:<32} {v:10.3g}" for k, v in report.items()))


if __name__ == "__main__":
    main()
