"""A step with the loss in parts of its rows beside the plain one: time and memory, on one rank.

python benchmarks/loss_chunks.py [--chunks 1,4,16] [--vocab 50304] [--width 256] [--layers 4] [--rows 8] [--length 256]
                                 [--rounds 5] [--json]

Programs take turns; a ratio is the median over rounds of a program's step over that of the first one (all rows at
once). Memory is the simulated peak of values beside parameters and gradients, which tests compare with the allocator's
(``tests/test_simulated_memory.py``); logits are those of all rows in float32.
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


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.between(x))))


class Gpt(nn.Module):
    """GPT-2's shape: the table of the vocabulary is that of the embedding."""

    def __init__(self, vocab: int, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight
        logits = F.linear(self.norm(self.blocks(x)), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--chunks", default="1,4,16")
    for name, usual in (("vocab", 50304), ("width", 256), ("layers", 4), ("rows", 8), ("length", 256), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    args = parser.parse_args()
    torch.manual_seed(0)
    ids = torch.randint(0, args.vocab, (2, args.rows, args.length))
    batch = {"ids": ids[0], "labels": ids[1]}
    programs = {}
    for count in map(int, args.chunks.split(",")):
        torch.manual_seed(0)
        model = Gpt(args.vocab, args.width, args.layers, args.length)
        programs[count] = quintnet.compile(model, Mesh(dp=1), batch, loss_chunks=count)
    seconds: dict[int, list[float]] = {count: [] for count in programs}
    losses = {}
    for turn in range(args.rounds + 1):
        for count, program in programs.items():
            begin = time.perf_counter()
            losses[count] = float(program.step(batch))
            if turn:
                seconds[count].append(time.perf_counter() - begin)
    first = next(iter(programs))
    rows = []
    for count, program in programs.items():
        ratio = statistics.median(a / b for a, b in zip(seconds[count], seconds[first], strict=True))
        rows.append(
            {
                "chunks": count, "seconds": statistics.median(seconds[count]), "ratio": ratio, "loss": losses[count],
                "peak_mib": program.simulate().peak.values / 2**20,
                "logits_mib": 4 * args.rows * args.length * args.vocab / 2**20,
            }
        )  # fmt: skip
    if args.json:
        print(json.dumps(rows, indent=1))
        return
    print(f"{'chunks':>6} {'step s':>8} {'ratio':>6} {'peak MiB':>9} {'logits MiB':>10} {'loss':>9}")
    for row in rows:
        print(
            f"{row['chunks']:>6} {row['seconds']:>8.3f} {row['ratio']:>6.2f} {row['peak_mib']:>9.0f} "
            f"{row['logits_mib']:>10.0f} {row['loss']:>9.5f}"
        )


if __name__ == "__main__":
    main()
