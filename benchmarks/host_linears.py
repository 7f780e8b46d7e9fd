"""Linear layers of a few rows on one core: PyTorch's, oneDNN's, and oneDNN's with a weight that was laid out for it.

python benchmarks/host_linears.py [--rows N]

Microseconds of processor time of a call, the least of rounds in which all take turns; weights of 16 MB take turns, too,
as the layers of a model do. ``lay out``: what it takes to lay a weight out once.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import cycle

import torch
import torch.nn.functional as F

from quintnet_compiler.compat.torch import host_linear, packed_weight, packs

SHAPES = ((640, 256), (1024, 512), (4096, 256))  # out, in
BYTES, CALLS, ROUNDS = 2**24, 40, 12


def measured(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Seconds of processor time of a call of each."""
    seconds = dict.fromkeys(calls, float("inf"))
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = time.thread_time()
            for _ in range(CALLS):
                call()
            seconds[name] = min(seconds[name], (time.thread_time() - start) / CALLS)
    return seconds


def of_shape(rows: int, out: int, inner: int, dtype: torch.dtype) -> dict[str, float]:
    """Return the seconds of a product [rows, inner] x [out, inner] by each way."""
    assert host_linear is not None
    product = host_linear
    count = max(1, BYTES // (out * inner * dtype.itemsize))
    weights = [torch.randn(out, inner).to(dtype) for _ in range(count)]
    x, plain, packed = torch.randn(rows, inner).to(dtype), cycle(weights), cycle([*map(packed_weight, weights)])
    return measured(
        {
            "PyTorch": lambda: F.linear(x, next(plain)),
            "oneDNN": lambda: product(x, next(plain), None, "none", [], ""),
            "laid out": lambda: product(x, next(packed), None, "none", [], ""),
            "lay out": lambda: packed_weight(next(plain)),
        }
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rows", type=int, default=8)
    rows = options.parse_args().rows
    torch.set_num_threads(1)
    for dtype in (torch.float32, torch.bfloat16):
        for out, inner in SHAPES if packs(dtype) else ():
            times = of_shape(rows, out, inner, dtype)
            each = ", ".join(f"{name} {1e6 * seconds:.0f}" for name, seconds in times.items())
            print(f"{str(dtype).removeprefix('torch.')} {rows} x {inner} x {out}: {each}", flush=True)


if __name__ == "__main__":
    main()
