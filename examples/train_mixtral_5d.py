"""Train a small Mixtral on five axes at once, beside the unsplit model: 16 ranks inside this process.

    python examples/train_mixtral_5d.py                    pp2 x dp2 x cp2 x tp2, experts spread over data ranks
    python examples/train_mixtral_5d.py --mesh dp=2,ep=2   any other mesh

The model is transformers' own, unchanged. It learns to continue sequences that count up in steps of its own; both
models start from the same weights and see the same batches. The exit code is 1 if their losses differ by more than
rounding explains.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections import Counter

import torch
from rich.console import Console
from torch import Tensor, nn
from transformers import MixtralConfig, MixtralForCausalLM

import quintnet

VOCAB, LENGTH = 64, 16
LIMIT = 1e-3  # of the difference between the two losses, which are float32


def mixtral() -> nn.Module:
    """Two layers with four experts each, of which every token takes two."""
    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=LENGTH,
        use_cache=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model: nn.Module = MixtralForCausalLM(config)
    return model


def batch(rows: int, dice: torch.Generator) -> dict[str, Tensor]:
    """Sequences ``start, start + step, start + 2 * step, ...`` modulo the vocabulary."""
    start, step = (torch.randint(0, high, (rows, 1), generator=dice) for high in (VOCAB, 8))
    ids = (start + step * torch.arange(LENGTH)) % VOCAB
    return {"input_ids": ids, "labels": ids}


def imbalance(model: nn.Module, inputs: dict[str, Tensor]) -> str:
    """How many tokens each expert of the first layer gets."""
    counts: Counter[int] = Counter()

    def see(module: nn.Module, args: tuple[Tensor, ...], output: object) -> None:
        counts.update(args[1].flatten().tolist())

    hook = model.get_submodule("model.layers.0.mlp.experts").register_forward_hook(see)
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    return ", ".join(str(counts[expert]) for expert in range(4))


def parse_mesh(text: str) -> dict[str, int]:
    """``pp=2,dp=2`` as a dict."""
    return {name: int(size) for name, _, size in (part.partition("=") for part in text.split(","))}


def main() -> int:
    """Train both, print both losses, and say whether they agree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", type=parse_mesh, default=parse_mesh("pp=2,dp=2,cp=2,tp=2"))
    parser.add_argument("--experts", default="", help="axes over which experts are spread; without ep: dp")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    console, dice = Console(), torch.Generator().manual_seed(1)
    torch.set_num_threads(1)
    model = mixtral()
    unsplit = copy.deepcopy(model)
    mesh = quintnet.Mesh(**args.mesh)
    experts = args.experts.split(",") if args.experts else ["ep"] if mesh["ep"] > 1 else ["dp"]
    program = quintnet.compile(model, mesh, batch(32, dice), microbatches=2, experts=experts)
    console.print(f"{mesh}: {mesh.size} ranks, experts over {' and '.join(experts)}")
    console.print(f"tokens per expert at the start: {imbalance(unsplit, batch(32, dice))}")
    ours = torch.optim.AdamW(program.parameters(), lr=3e-3)
    theirs = torch.optim.AdamW(unsplit.parameters(), lr=3e-3)
    worst, started = 0.0, time.perf_counter()
    for step in range(1, args.steps + 1):
        inputs = batch(32, dice)
        split_loss = program.step(inputs).item()
        loss = unsplit(**inputs).loss
        loss.backward()
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        worst = max(worst, abs(split_loss - loss.item()))
        if step % 10 == 0 or step == 1:
            console.print(f"step {step:3}   split {split_loss:.6f}   unsplit {loss.item():.6f}")
    console.print(f"tokens per expert at the end: {imbalance(unsplit, batch(32, dice))}")
    console.print(f"largest difference of the losses: {worst:.1e}, {time.perf_counter() - started:.0f} s")
    return 0 if worst < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
