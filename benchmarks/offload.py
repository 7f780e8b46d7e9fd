"""A GPT of 0.94 billion parameters on one GPU, with activations, parameters and the optimizer in host memory, and
activations in files: peak, time, results.

python benchmarks/offload.py [--layers 16] [--dim 2048] [--rows 4] [--length 1024] [--steps 7] [--folder DIR] [--json]

One rank, bf16 with float32 parameters. For each mode: the most memory of a step by PyTorch's allocator beside the
simulated peak, the median step beside the simulated one (an H100's prices), the loss, and how many gradients differ
from those without offload in any bit, with deterministic algorithms where PyTorch has them. (Backward kernels of
attention that add up atomically give other bits in each run.) With the optimizer on the host, the median of AdamW's
step (fused), too. ``--folder``: of a disk. Without a GPU, programs are only simulated, for CUDA.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet

MODES: dict[str, tuple[str, ...]] = {
    "without": (),
    "activations": ("activations",),
    "parameters": ("parameters",),
    "both": ("activations", "parameters"),
    "optimizer": ("optimizer",),
    "disk": ("activations",),
}


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, dim = x.shape
        q, k, v = (
            t.reshape(rows, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.ln1(x)).split(dim, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(rows, length, dim)
        x = x + self.proj(y)
        out: Tensor = x + self.down(F.gelu(self.up(self.ln2(x))))
        return out


class GPT(nn.Module):
    def __init__(self, layers: int, dim: int, length: int, vocabulary: int = 32000) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, dim // 128) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.ln(x))
        return logits


def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def measure(mode: str, args: argparse.Namespace, expected: dict[str, Tensor]) -> dict[str, Any]:
    """``expected``: the gradients of the first mode, which is the one without."""
    device = "cuda" if torch.cuda.is_available() else "meta"
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(args.layers, args.dim, args.length)
        batch = tuple(torch.randint(0, 32000, (args.rows, args.length)) for _ in range(2))
    program = quintnet.compile(
        model, quintnet.Mesh(dp=1), batch, loss_fn=loss_fn, device="cuda", precision="bf16", check="off",
        offload=MODES[mode], offload_folder=args.folder if mode == "disk" else None,  # type: ignore[arg-type]
    )  # fmt: skip
    predicted = program.simulate(quintnet.Cluster("h100"))
    (row,) = predicted.rows
    results: dict[str, Any] = {
        "mode": mode,
        "simulated MiB": row.peak.bytes / 2**20,
        "simulated MiB of the host": row.host_bytes / 2**20,
        "simulated MiB of files": row.disk_bytes / 2**20,
        "simulated ms": 1e3 * predicted.seconds,
        **({"simulated ms of the optimizer": 1e3 * row.update.seconds} if row.update else {}),
    }
    if device == "meta":
        return results
    program.step(batch)
    program.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    results["loss"] = float(program.step(batch))
    results["measured MiB"] = torch.cuda.max_memory_allocated() / 2**20
    mine = {name: p.grad.detach().cpu() for name, p in program.named_parameters() if p.grad is not None}
    expected.update({} if expected else mine)
    results["gradients that differ"] = sum(not torch.equal(x, expected[name]) for name, x in mine.items())
    results["measured ms"] = median(lambda: program.step(batch), program.zero_grad, args.steps)
    if row.update:
        optimizer = program.optimizer(lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True))
        results["measured ms of the optimizer"] = median(optimizer.step, lambda: None, args.steps)
    return results


def median(run: Callable[[], object], prepare: Callable[[], object], steps: int) -> float:
    """Milliseconds of ``run``."""
    times = []
    for _ in range(steps):
        prepare()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 16), ("dim", 2048), ("rows", 4), ("length", 1024), ("steps", 7)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", default=tempfile.gettempdir())
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    expected: dict[str, Tensor] = {}
    for mode in MODES:
        results = measure(mode, args, expected)
        texts = (
            f"{name} {value:,.1f}" if isinstance(value, float) else f"{name} {value}" for name, value in results.items()
        )
        print(json.dumps(results) if args.json else "  ".join(texts), flush=True)


if __name__ == "__main__":
    main()
