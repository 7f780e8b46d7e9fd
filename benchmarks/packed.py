"""A step of packed documents beside the same step with a mask of all positions, and beside one document: on one rank.

python benchmarks/packed.py [--length 4096] [--documents 8] [--heads 4] [--width 256] [--rounds 5] [--json]

Documents have unequal lengths, 1 : 2 : ... : n. Programs take turns; a ratio is the median over rounds of a program's
step over that of the mask. ``seen``: the pairs of a query and a key that documents leave of those that causality does.
``priced``: FLOP of a step, as prices and ``model_flops`` count them, over those of the mask; programs are told the
lengths. Kernels compute whole blocks of keys (512 of PyTorch's for CPUs) next to the diagonal, which prices leave out:
the shorter documents are, the more.

python benchmarks/packed.py --device cuda [--length 16384] [--heads 16] [--width 1024] [--documents 8]: in bf16 on a
GPU, beside a plain module with compiled flex_attention.

python benchmarks/packed.py --ranks 4 [--length 4096] [--documents 8] [--runs 4] [--rows 1] [--shuffled]: no step, but
by formula the work of the rank that has most over the mean, with a sequence over so many ranks: in order, with mirror
halves (a run near each end for every rank), and as ``context_load_balance`` assigns ``runs`` of each rank; and what
part of its positions the rank sends that sends most. ``rows``: of a batch, all but the first (or ``shuffled``: all)
with their documents in another order.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import quintnet
from quintnet import Mesh
from quintnet_compiler.ops.attention.ring_plan import assign_runs, runs_of_rank


class Packed(nn.Module):
    """Two layers of causal attention. ``how``: documents as ids, as a mask that the module makes, or none."""

    def __init__(self, width: int, heads: int, how: str) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
        self.heads, self.how = heads, how

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device)
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


class Flex(nn.Module):
    """The same, with documents, as flex_attention compiles it."""

    def __init__(self, like: Packed) -> None:
        super().__init__()
        self.qkv, self.heads, self.compiled = like.qkv, like.heads, torch.compile(flex_attention)

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (documents[b, q] == documents[b, k])

        blocks = create_block_mask(seen, x.shape[0], None, x.shape[1], x.shape[1], device=str(x.device))
        for qkv in self.qkv:
            q, k, v = qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
            x = x + self.compiled(q, k, v, block_mask=blocks).transpose(1, 2).flatten(2)
        return x.square().mean()


def lengths(length: int, count: int) -> list[int]:
    """1 : 2 : ... : n, the last with what is left."""
    whole = count * (count + 1) // 2
    sizes = [length * (i + 1) // whole for i in range(count)]
    return [*sizes[:-1], length - sum(sizes[:-1])]


def shuffled(sizes: list[int], seed: int) -> list[int]:
    """In another order for each ``seed`` but 0."""
    return random.Random(seed).sample(sizes, len(sizes)) if seed else sizes


def pairs(first: int, end: int, sizes: list[int]) -> int:
    """Return the number of keys that queries from ``first`` to ``end`` see, causally, in documents of ``sizes``."""
    total = begin = 0
    for size in sizes:
        start, last = max(first, begin), min(end, begin + size)
        if start < last:
            count = last - start
            total += (start - begin) * count + count * (count + 1) // 2
        begin += size
    return total


@dataclass(frozen=True)
class Uneven:
    """The most work of a rank over the mean: of runs in order, of one near each end, and of assigned runs; ``leaving``:
    the largest part of a rank's positions that these send to others."""

    in_order: float
    mirrored: float
    assigned: float
    leaving: float


def uneven(rows: list[list[int]], ranks: int, runs: int = 2) -> Uneven:
    """Return the imbalance of rows with documents of these lengths, if each rank has ``runs`` runs, an even number."""
    length, parts = sum(rows[0]), runs * ranks
    work = [sum(pairs(length * i // parts, length * (i + 1) // parts, sizes) for sizes in rows) for i in range(parts)]
    homes = [range(rank * runs, (rank + 1) * runs) for rank in range(ranks)]
    half = runs // 2
    mirrored = [[*range(at, at + half), *range(parts - at - half, parts - at)] for at in range(0, half * ranks, half)]
    held = assign_runs(work, ranks)
    most = (
        max(sum(work[i] for i in mine) for mine in assignment) * ranks / sum(work)
        for assignment in (homes, mirrored, held)
    )
    return Uneven(*most, max(len({*home} - {*mine}) for home, mine in zip(homes, held, strict=True)) / runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("length", 4096), ("documents", 8), ("heads", 4), ("width", 256), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, choices=range(2, 129, 2), metavar="2, 4, ...")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--shuffled", action="store_true")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    sizes = lengths(args.length, args.documents)
    if args.ranks:
        rows = [shuffled(sizes, row + args.shuffled) for row in range(args.rows)]
        imbalance = uneven(rows, args.ranks, args.runs or runs_of_rank(args.length // args.ranks))
        print("most over mean: {in_order:.2f} in order, {mirrored:.2f} mirrored, {assigned:.2f} assigned; "
              "{leaving:.2f} leaves".format(**asdict(imbalance)))  # fmt: skip
        return
    device = torch.device(args.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    x, documents = torch.randn(1, args.length, args.width), torch.repeat_interleave(torch.tensor(sizes))[None]
    batch = x.to(device, dtype), documents.to(device)

    programs: dict[str, quintnet.CompiledProgram] = {}

    def step_of(variant: str) -> Callable[[], object]:
        model = Packed(args.width, args.heads, variant).to(dtype)
        if variant == "flex_attention":
            plain = Flex(model).to(device)
            return lambda: plain(*batch).backward()
        program = quintnet.compile(model, Mesh(dp=1), batch, device=device, expect={"documents": sizes})
        programs[variant] = program
        return lambda: program.step(batch)

    names = ["mask", "documents", "one document", *(["flex_attention"] if device.type == "cuda" else [])]
    steps = {variant: step_of(variant) for variant in names}
    seconds: dict[str, list[float]] = {variant: [] for variant in steps}
    for turn in range(args.rounds + 1):  # the first one warms up
        for variant, step in steps.items():
            begun = time.perf_counter()
            step()
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
            if turn:
                seconds[variant].append(time.perf_counter() - begun)
    results = {
        "seen": sum(n * n for n in sizes) / args.length**2,
        "seconds": {variant: statistics.median(times) for variant, times in seconds.items()},
        "ratio": {
            variant: statistics.median(a / b for a, b in zip(times, seconds["mask"], strict=True))
            for variant, times in seconds.items()
        },
        "priced": {
            variant: compiled.model_flops / programs["mask"].model_flops for variant, compiled in programs.items()
        },
    }
    print(json.dumps(results) if args.json else "\n".join(f"{name}: {value}" for name, value in results.items()))


if __name__ == "__main__":
    main()
