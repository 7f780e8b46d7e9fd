"""What comparing a program with its module costs: the aim is at most a fifth of compiling it and one eager step of the
module. All is CPU time of this process, once each.

python benchmarks/check_cost.py [gpt2] [llama] [--rows N] [--length N] [--layers N]

gpt2: GPT-2 small (transformers' default configuration, random weights) in float32, tp=2. llama: the configuration of
benchmarks/compile_scale.py (Llama 3.1 405B's, bfloat16, on the meta device) for tp=8 within pp=16.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import quintnet

sys.path.insert(0, str(Path(__file__).parent))
from compile_scale import llama


def gpt2() -> nn.Module:
    """GPT-2 small with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model: nn.Module = GPT2LMHeadModel(GPT2Config(use_cache=False))
    return model.train()


def timed(work: Callable[[], Any]) -> float:
    """CPU seconds of this process: other work on the machine counts less than in wall time."""
    start = time.process_time()
    work()
    return time.process_time() - start


def measure(name: str, model: nn.Module, batch: dict[str, torch.Tensor], mesh: quintnet.Mesh, **options: Any) -> None:
    """Compile without the check, then check what was compiled."""
    made: list[quintnet.CompiledProgram] = []
    compiled = timed(lambda: made.append(quintnet.compile(model, mesh, batch, check="off", device="cpu", **options)))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", quintnet.CheckWarning)
        checked = timed(lambda: made[0]._programs.difference("train", batch))
    eager, meta = 0.0, any(p.is_meta for p in model.parameters())

    def step() -> None:
        model(**batch).loss.backward()
        model.zero_grad()

    if not meta:
        step()
        eager = timed(step)
    share, limit = checked / compiled, compiled / 5 + eager
    print(f"{name}: compiling {compiled:.1f} s of CPU time, comparing {checked:.1f} s ({share:.0%}); ", end="")
    print(f"an eager step {'is not possible' if meta else f'{eager:.1f} s'}; limit {limit:.1f} s", flush=True)
    for text in dict.fromkeys(str(w.message) for w in said if issubclass(w.category, quintnet.CheckWarning)):
        print(f"  {text}")


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("models", nargs="*", default=["gpt2", "llama"])
    options.add_argument("--rows", type=int, default=8)
    options.add_argument("--length", type=int, default=128)
    options.add_argument("--layers", type=int, default=32)
    given = options.parse_args()
    torch.set_num_threads(2)
    if "gpt2" in given.models:
        ids = torch.randint(0, 50257, (given.rows, given.length))
        measure("GPT-2 small", gpt2(), {"input_ids": ids, "labels": ids}, quintnet.Mesh(tp=2))
    if "llama" in given.models:
        ids = torch.zeros(16, 8192, dtype=torch.long, device="meta")
        mesh = quintnet.Mesh(pp=16, tp=8)
        name = f"Llama 405B's layers, {given.layers} of them"
        measure(name, llama(given.layers), {"input_ids": ids, "labels": ids}, mesh, microbatches=16)


if __name__ == "__main__":
    main()
