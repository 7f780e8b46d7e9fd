"""What it takes to see that a module is as it was traced: GPT-2 small (meta device); and 200 steps of a small model
beside a log that grows, against 200 without: in an attribute that forward does not read, and in a dict that it reads.
All in CPU time, the least of many runs in turn.

python benchmarks/guards.py
"""

from __future__ import annotations

import time
import timeit
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import quintnet
from quintnet_compiler.capture.capture import capture

REPEATS, CALLS = 400, 20
NUMBERS = list(range(1000))
STEPS, WIDTH, ROWS, TURNS = 200, 512, 64, 5


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
    """Return the CPU seconds of steps, after each of which the log named by ``log`` has one entry more."""
    model = Logged()
    batch = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    program = quintnet.compile(model, quintnet.Mesh(dp=2), batch, loss_fn=F.mse_loss)
    optimizer = torch.optim.AdamW(program.parameters())
    logs = {"none": [], "attribute": model.log, "dict": model.config["log"]}
    start = time.process_time()
    for _ in range(STEPS):
        loss = program.step(batch)
        optimizer.step()
        optimizer.zero_grad()
        logs[log].append(float(loss))
    return time.process_time() - start


def measure_logs() -> None:
    """Print how much longer steps take beside a log that grows: each kind in turn, the fastest counts."""
    kinds = ("none", "attribute", "dict")
    runs = [{kind: seconds_of_steps(kind) for kind in kinds} for _ in range(TURNS)]
    best = {kind: min(run[kind] for run in runs) for kind in kinds}
    for kind in kinds[1:]:
        print(f"{STEPS} steps beside a log in {kind}: {best[kind] / best['none']:.3f} of {best['none']:.2f} s without")


def microseconds(call: Callable[[], object]) -> float:
    """Return the CPU microseconds of a call."""
    return min(timeit.repeat(call, timer=time.process_time, number=CALLS, repeat=REPEATS)) / CALLS * 1e6


def loop() -> None:
    """Loop over 1,000 numbers: what a machine can do."""
    for _ in NUMBERS:
        pass


def main() -> None:
    torch.set_num_threads(1)
    measure_logs()
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config())
        ids = torch.zeros(2, 64, dtype=torch.long)
    guards = capture(model, {"input_ids": ids, "labels": ids}).guards
    assert guards is not None and guards.hold()
    whole = microseconds(guards.hold)
    print(f"{microseconds(guards.versions.hold):5.1f} us  classes, and versions of dicts")
    for holds in guards.elsewhere:
        print(f"{microseconds(holds):5.1f} us  {type(getattr(holds, '__self__', holds)).__name__}")
    after_write = microseconds(lambda: (setattr(model, "written", object()), guards.hold()))
    print(f"{whole:.0f} us, {after_write:.0f} us after a write; a loop over 1,000 numbers {microseconds(loop):.1f} us")


if __name__ == "__main__":
    main()
