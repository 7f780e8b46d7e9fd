"""Steps of a Llama of three layers in 8 bits beside 16 bits, on one GPU: generated Python, and TorchInductor.

python benchmarks/eight_bit_step.py [--dim 4096] [--hidden 14336] [--sequence 4096] [--rows 2] [--steps 7] [--json]

Parameters and gradients are float32. The median time of a step, its loss, the most memory, and how long it took to
compile and to take the first three steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from models import Llama, Size, loss_fn, make_batch
from torch import Tensor

import quintnet

MODES = {"bf16": {"precision": "bf16"}} | {
    recipe: {"precision": "fp8", "fp8_recipe": recipe} for recipe in ("tensorwise", "rowwise")
}


def measure(size: Size, batch: tuple[Tensor, ...], steps: int, how: dict[str, Any]) -> dict[str, float]:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Llama(size)
    torch.cuda.reset_peak_memory_stats()
    begun = time.perf_counter()
    program = quintnet.compile(
        model, quintnet.Mesh(dp=1), batch, loss_fn=loss_fn, device="cuda", check="off", **how
    )  # fmt: skip

    def step() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        program.step(batch)
        program.zero_grad()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    for _ in range(3):
        step()
    made = time.perf_counter() - begun
    times = [step() for _ in range(steps)]
    return {
        "ms": 1e3 * statistics.median(times),
        "loss": float(program.step(batch)),
        "GiB": torch.cuda.max_memory_allocated() / 2**30,
        "made, s": made,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = (("dim", 4096), ("hidden", 14336), ("sequence", 4096), ("rows", 2), ("steps", 7))
    for name, default in sizes:
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device")
    heads = given.dim // 128
    size = Size(given.dim, 3, heads, heads // 4, given.hidden, 8192, given.sequence)
    batch = tuple(x.cuda() for x in make_batch(size, given.rows, 0))
    for mode, how in MODES.items():
        for backend in ("eager", "inductor"):
            found = measure(size, batch, given.steps, {**how, "backend": backend})
            told = "  ".join(f"{name} {value:.5g}" for name, value in found.items())
            print(
                json.dumps({"mode": mode, "backend": backend, **found}) if given.json else f"{mode}, {backend}: {told}"
            )


if __name__ == "__main__":
    main()
