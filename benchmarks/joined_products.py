"""Linear layers of the same rows as one product, beside one product each: forward, and both gradients.

python benchmarks/joined_products.py [--device cuda]

Rows and widths are those of queries, keys and values, and of gate and up, in Llama-3: one rank of the 70B with tp=8,
and the 8B whole. Gradients of rows are added up where layers are apart, in one kernel; gradients of weights are added
to float32. Prints milliseconds, medians of 20.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

TIMES, WARM_TIMES = 20, 4


@dataclass(frozen=True)
class Layers:
    """Linear layers that read the same ``rows`` of ``width``; ``columns`` of each."""

    rows: int
    width: int
    columns: list[int]


CASES = {
    "70B, tp=8: queries, keys, values": Layers(4096, 8192, [1024, 128, 128]),
    "70B, tp=8: gate, up": Layers(4096, 8192, [3584, 3584]),
    "8B: queries, keys, values": Layers(8192, 4096, [4096, 1024, 1024]),
    "8B: gate, up": Layers(8192, 4096, [14336, 14336]),
}


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the median time of ``work``, each until the device is done."""
    times = []
    for _ in range(WARM_TIMES + TIMES):
        begin = time.perf_counter()
        work()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times[WARM_TIMES:])


def accumulate(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add ``a @ b`` to a float32 tensor; the CPU has no such product of 16-bit numbers."""
    if total.device.type == "cpu":
        total.add_(a @ b)
    else:
        torch.ops.aten.addmm.dtype_out(total, a, b, torch.float32, out=total)


def _sum(terms: list[Tensor]) -> Tensor:
    return functools.reduce(torch.add, terms)


def measure(layers: Layers, device: torch.device) -> dict[str, float]:
    """Return milliseconds of each product, apart and joined."""
    columns = sum(layers.columns)
    x = torch.randn(layers.rows, layers.width, device=device, dtype=torch.bfloat16)
    weight = torch.randn(columns, layers.width, device=device, dtype=torch.bfloat16)
    gradient = torch.randn(layers.rows, columns, device=device, dtype=torch.bfloat16)
    total = torch.zeros(columns, layers.width, device=device)
    weights, totals = torch.split(weight, layers.columns), torch.split(total, layers.columns)
    gradients = [part.contiguous() for part in torch.split(gradient, layers.columns, 1)]

    add = torch.compile(_sum) if device.type == "cuda" else _sum

    def rows_apart() -> Tensor:
        return add([part @ w for part, w in zip(gradients, weights, strict=True)])

    def weights_apart() -> None:
        for part, part_total in zip(gradients, totals, strict=True):
            accumulate(part_total, part.t(), x)

    works: dict[str, Callable[[], object]] = {
        "forward apart": lambda: [x @ w.t() for w in weights],
        "forward joined": lambda: x @ weight.t(),
        "rows apart": rows_apart,
        "rows joined": lambda: gradient @ weight,
        "weights apart": weights_apart,
        "weights joined": lambda: accumulate(total, gradient.t(), x),
    }
    return {name: milliseconds(work, device) for name, work in works.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    device = torch.device(parser.parse_args().device)
    for name, layers in CASES.items():
        print(json.dumps({"layers": name, **measure(layers, device)}), flush=True)


if __name__ == "__main__":
    main()
