"""A step of packed documents beside the same step with a mask of all positions, and beside one document: on one rank.

python benchmarks/packed.py [--length 4096] [--documents 8] [--heads 4] [--width 256] [--rounds 5] [--json]

Documents have unequal lengths, 1 : 2 : ... : n. Programs take turns; a ratio is the median over rounds of a program's
step over that of the mask. ``seen``: the pairs of a query and a key that documents leave of those that causality does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import Mesh


class Packed(nn.Module):
    """Two layers of causal attention. ``how``: documents as ids, as a mask that the module makes, or none."""

    def __init__(self, width: int, heads: int, how: str) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.heads, self.how = heads, how

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        same = documents[:, None, :, None] == documents[:, None, None, :]
        for qkv in self.qkv:
            q, k, v = qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
            if self.how == "mask":
                y = F.scaled_dot_product_attention(q, k, v, attn_mask=same & (at[:, None] >= at))
            else:
                ids = documents if self.how == "documents" else None
                scale = q.shape[-1] ** -0.5
                y = torch.ops.quintnet.attention(q, k, v, None, ids, scale=scale, mask="causal")
            x = x + y.transpose(1, 2).flatten(2)
        return x.square().mean()


def lengths(length: int, count: int) -> list[int]:
    """1 : 2 : ... : n, the last with what is left."""
    whole = count * (count + 1) // 2
    found = [length * (i + 1) // whole for i in range(count)]
    return [*found[:-1], length - sum(found[:-1])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("length", 4096), ("documents", 8), ("heads", 4), ("width", 256), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.manual_seed(0)
    sizes = lengths(given.length, given.documents)
    batch = torch.randn(1, given.length, given.width), torch.repeat_interleave(torch.tensor(sizes))[None]
    programs = {
        how: quintnet.compile(Packed(given.width, given.heads, how), Mesh(dp=1), batch)
        for how in ("mask", "documents", "one document")
    }
    seconds: dict[str, list[float]] = {how: [] for how in programs}
    for turn in range(given.rounds + 1):  # the first one warms up
        for how, program in programs.items():
            begun = time.perf_counter()
            program.step(batch)
            if turn:
                seconds[how].append(time.perf_counter() - begun)
    found = {
        "seen": sum(n * n for n in sizes) / given.length**2,
        "seconds": {how: statistics.median(times) for how, times in seconds.items()},
        "ratio": {
            how: statistics.median(a / b for a, b in zip(times, seconds["mask"], strict=True))
            for how, times in seconds.items()
        },
    }
    print(json.dumps(found) if given.json else "\n".join(f"{name}: {value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
