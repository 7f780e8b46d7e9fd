"""What it takes to see that a module is as it was traced: GPT-2 small (meta device); and 200 steps of a small model
beside a log that grows, against 200 without: in an attribute that forward does not read, and in a dict that it reads.

python benchmarks/guards.py
"""

from __future__ import annotations

import time
import timeit
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import quintnet
from quintnet_compiler.capture.capture import capture

REPEATS, CALLS = 400, 20
STEPS, WIDTH, ROWS = 200, 512, 64


class Logged(nn.Module):
    """Reads a number of ``config``, which may also hold a log; ``log`` is another one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.config: dict[str, Any] = {"scale": 2.0, "log": []}
        self.log: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.config["scale"]


def seconds_of_steps(log: str) -> float:
    """Return the seconds of steps, after each of which the log named by ``log`` has one entry more."""
    model = Logged()
    batch = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    program = quintnet.compile(model, quintnet.Mesh(dp=2), batch, loss_fn=F.mse_loss)
    optimizer = torch.optim.AdamW(program.parameters())
    logs = {"none": [], "attribute": model.log, "dict": model.config["log"]}
    start = time.perf_counter()
    for _ in range(STEPS):
        loss = program.step(batch)
        optimizer.step()
        optimizer.zero_grad()
        logs[log].append(float(loss))
    return time.perf_counter() - start


def measure_logs() -> None:
    """Print how much longer steps take beside a log that grows: each kind three times in turn, the fastest counts."""
    kinds = ("none", "attribute", "dict")
    runs = [{kind: seconds_of_steps(kind) for kind in kinds} for _ in range(3)]
    best = {kind: min(run[kind] for run in runs) for kind in kinds}
    for kind in kinds[1:]:
        print(f"{STEPS} steps beside a log in {kind}: {best[kind] / best['none']:.3f} of {best['none']:.2f} s without")


def main() -> None:
    measure_logs()
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
        ids = torch.zeros(2, 64, dtype=torch.long)
    guards = capture(model, {"input_ids": ids, "labels": ids}).guards
    assert guards is not None and guards.hold()
    seconds = min(timeit.repeat(guards.hold, number=CALLS, repeat=REPEATS)) / CALLS
    for guard in guards._all:
        part = min(timeit.repeat(guard.hold, number=CALLS, repeat=REPEATS)) / CALLS
        print(f"{part * 1e6:5.1f} us  {type(guard).__name__}")
    loop = min(
        timeit.repeat("for number in numbers: pass", "numbers = list(range(1000))", number=CALLS, repeat=REPEATS)
    )
    print(f"{seconds * 1e6:.0f} us; a loop over 1,000 numbers {loop / CALLS * 1e6:.1f} us")


if __name__ == "__main__":
    main()
