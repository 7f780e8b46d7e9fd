"""Matmuls of 8-bit numbers on a GPU: PyTorch's kernel, ours with its copies, and the casts around it.

python benchmarks/eight_bit_matmuls.py [--rows 8192] [--recipe tensorwise|rowwise|blockwise|mxfp8] [--experts]

For the three matmuls of a linear layer, in milliseconds (medians of 20): ``bf16``, as ``torch.mm``; ``kernel``, that of
8-bit numbers, of operands that lie as it wants them; ``ours``, with the copies that lay them so; ``casts``, the scales
and 8-bit numbers of both operands, each by itself, as generated Python has it; ``dequantised``, of 32-bit numbers that
these stand for. ``kernel`` is nan where a device has none. ``--experts``: grouped matmuls of rows by matrices, ``bf16``
and PyTorch's ``kernel`` for 8 bits, rowwise. Needs compute capability 8.9, experts 9.0.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from quintnet_compiler.features.fp8.eight_bits import RECIPES, Operand
from quintnet_compiler.features.fp8.ops.scaled_kernels import kernel_for
from quintnet_compiler.features.fp8.ops.scaled_products import (
    FORWARD,
    OF_INPUT,
    OF_WEIGHT,
    block_max,
    block_scale,
    product,
    scaled_cast,
    scaled_matmul,
)

E4M3, TIMES, WARM = torch.float8_e4m3fn, 20, 3
EXPERTS = ((16384, 8, 14336, 4096), (32768, 64, 1536, 7168), (65536, 128, 768, 2048))  # rows, experts, out, features
LAYERS = ((4096, 4096), (14336, 4096), (8192, 8192))  # features of the result, and of the input


def milliseconds(call: Callable[[], object]) -> float:
    found = []
    for turn in range(WARM + TIMES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        if turn >= WARM:
            found.append(begin.elapsed_time(end))
    return statistics.median(found)


def cast(x: Tensor, block: list[int], *, power_of_two: bool) -> tuple[Tensor, Tensor]:
    scale = block_scale(block_max(x, block), E4M3, power_of_two)
    return scaled_cast(x, scale, E4M3), scale


OPERANDS: dict[str, tuple[tuple[Operand, int], tuple[Operand, int]]] = {  # and the dim that is summed over
    FORWARD: (("input", 1), ("weight", 1)),
    OF_INPUT: (("gradient", 1), ("weight", 0)),
    OF_WEIGHT: (("gradient", 0), ("input", 0)),
}


def measure(equation: str, rows: int, out: int, features: int, recipe: str) -> dict[str, float]:
    sizes, how = {"m": rows, "n": out, "k": features}, RECIPES[recipe]
    letters = equation.partition("->")[0].split(",")
    a, b = (torch.randn(*(sizes[i] for i in part), device="cuda", dtype=torch.bfloat16) for part in letters)
    each = [(x, how.block(name, x.shape, dim)) for x, (name, dim) in zip((a, b), OPERANDS[equation], strict=True)]
    casts = lambda: [cast(x, block, power_of_two=how.power_of_two) for x, block in each]  # noqa: E731
    (a8, scale_a), (b8, scale_b) = casts()
    plain = {FORWARD: lambda: a @ b.T, OF_INPUT: lambda: a @ b, OF_WEIGHT: lambda: a.T @ b}[equation]
    ready_a, ready_scale_a = (a8.T.contiguous(), scale_a.T) if equation == OF_WEIGHT else (a8, scale_a)
    ready_b, ready_scale_b = (b8.T, scale_b.T) if equation == FORWARD else (b8.T.contiguous().T, scale_b)
    ready = ready_a, ready_b, ready_scale_a, ready_scale_b
    there = kernel_for(*ready, torch.bfloat16, how.power_of_two) is not None
    return {
        "bf16": milliseconds(plain),
        "kernel": milliseconds(lambda: product(*ready, torch.bfloat16, how.power_of_two)) if there else float("nan"),
        "ours": milliseconds(
            lambda: scaled_matmul(a8, b8, scale_a, scale_b, equation, torch.bfloat16, how.power_of_two)
        ),
        "casts": milliseconds(casts),
        "dequantised": milliseconds(lambda: product(*ready, torch.float32)),
    }


def measure_experts(rows: int, experts: int, out: int, features: int) -> dict[str, float]:
    """Runs of equally many rows."""
    x = torch.randn(rows, features, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(experts, out, features, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    ends = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * (rows // experts)
    (x8, scale_x), (w8, scale_w) = cast(x, [1, 0], power_of_two=True), cast(weight, [1, 0, 1], power_of_two=True)
    scales = scale_x.flatten(), scale_w.flatten(1).contiguous()
    grouped, scaled = torch.ops.aten._grouped_mm.default, torch.ops.aten._scaled_grouped_mm.default
    return {
        "bf16": milliseconds(lambda: grouped(x, weight, ends)),
        "kernel": milliseconds(lambda: scaled(x8, w8, *scales, ends, None, None, torch.bfloat16)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--recipe", choices=("tensorwise", "rowwise", "blockwise", "mxfp8"), default="tensorwise")
    parser.add_argument("--experts", action="store_true")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch finds no CUDA device")
    for sizes in EXPERTS if given.experts else ():
        told = "  ".join(f"{name} {ms:.3f}" for name, ms in measure_experts(*sizes).items())
        print("{} rows, {} experts, {} by {}: ".format(*sizes) + told)
    for out, features in () if given.experts else LAYERS:
        for equation in (FORWARD, OF_INPUT, OF_WEIGHT):
            found = measure(equation, given.rows, out, features, given.recipe)
            told = "  ".join(f"{name} {ms:.3f}" for name, ms in found.items())
            print(f"{equation:10} rows {given.rows}, {features} to {out}: {told}")


if __name__ == "__main__":
    main()
