"""A transformer block with layout-invariant dropout, against the same block with torch's own dropout.

python benchmarks/dropout.py [--rounds N] [--json]

Forward and backward of a medium block (8 x 128 tokens, width 768, 12 heads, p = 0.1 on attention weights and on both
residual branches; or normal noise on its input), float32, one thread, both sides alternating step by step. Prints the
paired ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet

ROWS, LENGTH, WIDTH, HEADS, P = 8, 128, 768, 12, 0.1
VARIANTS = {"dropout": (P, 0.0), "noise": (0.0, 0.1), "neither": (0.0, 0.0)}


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, p: float, noise: float = 0.0) -> None:
        super().__init__()
        self.p, self.noise, self.drop = p, noise, nn.Dropout(p)
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        if self.noise:
            x = x + self.noise * torch.randn_like(x)
        q, k, v = (y.view(b, t, HEADS, c // HEADS).transpose(1, 2) for y in self.qkv(self.ln1(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.p if self.training else 0.0)
        x = x + self.drop(self.proj(y.transpose(1, 2).reshape(b, t, c)))
        return x + self.drop(self.down(F.gelu(self.up(self.ln2(x)))))


def _loss(out: Tensor, target: Tensor) -> Tensor:
    return (out * target).sum()


def _seconds(step: Callable[[], object]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def measure(rounds: int) -> dict[str, float]:
    """Median milliseconds of each side, and the median of the ratios round by round."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batch = (torch.randn(ROWS, LENGTH, WIDTH), torch.randn(ROWS, LENGTH, WIDTH))
    sides: dict[str, Callable[[], object]] = {}
    for name, options in VARIANTS.items():
        model = Block(*options)
        program = quintnet.compile(model, quintnet.Mesh(dp=1), batch, loss_fn=_loss)
        twin = Block(*options)

        def ours(program: quintnet.CompiledProgram = program) -> None:
            program.zero_grad()
            program.step(batch)

        def theirs(twin: nn.Module = twin) -> None:
            twin.zero_grad()
            _loss(twin(batch[0]), batch[1]).backward()

        sides |= {f"ours, {name}": ours, f"torch, {name}": theirs}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for step in sides.values():
        step()
    for _ in range(rounds):
        for name, step in sides.items():
            seconds[name].append(_seconds(step))
    report = {f"ms, {name}": 1e3 * statistics.median(times) for name, times in seconds.items()}
    for name in VARIANTS:
        pairs = zip(seconds[f"ours, {name}"], seconds[f"torch, {name}"], strict=True)
        report[f"ours/torch, {name}"] = statistics.median(a / b for a, b in pairs)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    report = measure(args.rounds)
    print(json.dumps(report, indent=2) if args.json else "\n".join(f"{k:<24} {v:8.2f}" for k, v in report.items()))


if __name__ == "__main__":
    main()
