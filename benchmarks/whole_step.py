"""Whole training steps on one device beside what else people run: tokens a second, MFU, memory, first losses.

python benchmarks/whole_step.py --model 1b --sequence 8192 --peers quintnet,torchtitan
python benchmarks/whole_step.py --model 8b-slice --sequence 8192 --peers quintnet-fp8,torchtitan-fp8
python benchmarks/whole_step.py --model 1b --sequence 65536 --recompute --loss-chunks 32 --peers quintnet,torchtitan
python benchmarks/whole_step.py --model tiny --sequence 64 --device cpu --peers quintnet-eager,transformers

A step is forward, backward, clipping by the norm and AdamW (fused on GPUs). All peers train transformers' Llama from
the same float32 weights on the same tokens, in bf16 on GPUs. ``torchtitan`` is its recipe for one GPU: FSDP2
over one rank, each block compiled; ``-fp8``: torchao's tensorwise linear layers there, ``precision="fp8"`` here, the
head in 16 bits in both. MFU: 6 N + 6 L h S FLOP a token (causal attention), over 989 TFLOP/s.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import quintnet

PEAK_FLOPS = 989e12  # of an H100 or H200 in bf16, by NVIDIA's data sheet
WARM_STEPS = 2
Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a Llama."""

    width: int
    layers: int
    heads: int
    key_heads: int
    hidden: int
    words: int
    tied: bool = False

    def config(self, length: int) -> transformers.LlamaConfig:
        """Return transformers' configuration for sequences of ``length`` tokens."""
        return transformers.LlamaConfig(
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            intermediate_size=self.hidden,
            vocab_size=self.words,
            max_position_embeddings=length,
            tie_word_embeddings=self.tied,
            attn_implementation="sdpa",
        )

    def flops_of_token(self, length: int) -> float:
        """Return the FLOP of forward and backward for one of ``length`` tokens."""
        keys = self.width * self.key_heads // self.heads
        layer = 2 * self.width * (self.width + keys) + 3 * self.width * self.hidden
        return 6 * (self.layers * layer + self.width * self.words) + 6 * self.layers * self.width * length


MODELS = {
    "1b": Sizes(2048, 16, 32, 8, 8192, 128256, tied=True),
    "8b-slice": Sizes(4096, 8, 32, 8, 14336, 128256),
    "tiny": Sizes(64, 2, 4, 2, 128, 512),
}


@dataclass(frozen=True)
class Work:
    """Work of all peers: a model, tokens and a device.

    ``recompute``: each block's forward runs again in its backward. ``loss_chunks``: parts in which ``quintnet``
    computes the loss; the other peers have no such option.
    """

    sizes: Sizes
    ids: Tensor
    device: torch.device
    recompute: bool = False
    loss_chunks: int = 1

    @property
    def batch(self) -> dict[str, Tensor]:
        """A batch of transformers' causal models: the labels are the tokens, which the model shifts."""
        return {"input_ids": self.ids, "labels": self.ids}

    def model(self) -> transformers.LlamaForCausalLM:
        """Return the model with the weights that all peers begin with."""
        torch.manual_seed(0)
        with torch.device(self.device):
            return transformers.LlamaForCausalLM(self.sizes.config(self.ids.shape[1])).float().train()

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer that all peers use."""
        return torch.optim.AdamW(module.parameters(), lr=1e-4, weight_decay=0.1, fused=self.device.type == "cuda")

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


def quintnet_step(work: Work, peer: str) -> Step:
    """Return a step of a compiled program."""
    precision = "fp8" if "fp8" in peer else "bf16"
    options: dict[str, Any] = {"precision": precision} if work.on_gpu else {}
    if work.recompute:
        options["recompute"] = "full"
    if work.loss_chunks > 1:
        options["loss_chunks"] = work.loss_chunks
    backend = "eager" if "eager" in peer else "inductor"
    program = quintnet.compile(
        work.model(), quintnet.Mesh(), work.batch, device=str(work.device), backend=backend, check="off", **options
    )  # fmt: skip
    optimizer = torch.optim.AdamW(program.parameters(), lr=1e-4, weight_decay=0.1, fused=work.on_gpu)

    def step() -> Tensor:
        loss = program.step(work.batch)
        program.clip_grad_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def transformers_step(work: Work, peer: str) -> Step:
    """Return a step of a loop over transformers' model, compiled by torch if the peer says so."""
    model = work.model()
    if work.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    run = torch.compile(model) if "compile" in peer else model

    def loss_of() -> Tensor:
        with torch.autocast(work.device.type, torch.bfloat16, enabled=work.on_gpu):
            return run(**work.batch, use_cache=False).loss

    return _plain_step(model, work.optimizer(model), loss_of)


def torchtitan_step(work: Work, peer: str) -> Step:
    """Return a step of torchtitan's recipe for one GPU."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if not dist.is_initialized():
        meeting = f"file://{Path(tempfile.mkdtemp()) / 'meeting'}"
        dist.init_process_group("nccl" if work.on_gpu else "gloo", init_method=meeting, rank=0, world_size=1)
    model = work.model()
    if work.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if "fp8" in peer:
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(model, module_filter_fn=_is_inner_linear)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if work.on_gpu else MixedPrecisionPolicy()
    for block in model.model.layers:
        if work.on_gpu:
            block.compile()
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    labels = torch.cat([work.ids[:, 1:], work.ids.new_full((len(work.ids), 1), -100)], 1).flatten()
    cross_entropy = torch.compile(_cross_entropy) if work.on_gpu else _cross_entropy
    return _plain_step(
        model,
        work.optimizer(model),
        lambda: cross_entropy(model(input_ids=work.ids, use_cache=False).logits, labels),
    )


def _is_inner_linear(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and "lm_head" not in name


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels)


def _plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[], Tensor]) -> Step:
    def step() -> Tensor:
        loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


PEERS = {"quintnet": quintnet_step, "transformers": transformers_step, "torchtitan": torchtitan_step}


def measure(work: Work, peer: str, steps: int) -> dict[str, float | str]:
    """Return what a peer's step takes: milliseconds (median), tokens a second, MFU, GiB, and its first loss."""
    step = PEERS[peer.partition("-")[0]](work, peer)
    first = float(step())
    for _ in range(WARM_STEPS):
        step()
    if work.on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times = [_seconds(step, work) for _ in range(steps)]
    seconds, tokens = statistics.median(times), work.ids.numel()
    flops = tokens * work.sizes.flops_of_token(work.ids.shape[1])
    row: dict[str, float | str] = {"peer": peer, "ms": 1e3 * seconds, "tokens/s": tokens / seconds, "first loss": first}
    if work.on_gpu:
        row |= {"MFU %": 100 * flops / seconds / PEAK_FLOPS, "GiB": torch.cuda.max_memory_allocated() / 2**30}
    return row


def _seconds(step: Step, work: Work) -> float:
    begin = time.perf_counter()
    step()
    if work.on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="1b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--recompute", action="store_true", help="each block's forward runs again in its backward")
    parser.add_argument("--loss-chunks", type=int, default=1, help="parts of the loss, in quintnet's peers")
    parser.add_argument("--peers", default="quintnet,quintnet-eager,transformers,transformers-compile,torchtitan")
    options = parser.parse_args()
    sizes = MODELS[options.model]
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(sizes.words, (options.rows, options.sequence), generator=generator).to(options.device)
    work = Work(sizes, ids, ids.device, options.recompute, options.loss_chunks)
    for peer in options.peers.split(","):
        try:
            row = measure(work, peer, options.steps)
        except torch.OutOfMemoryError as error:
            row = {"peer": peer, "out of memory": str(error)[:120]}
        print(json.dumps(row), flush=True)
        gc.collect()
        torch._dynamo.reset()
        if work.on_gpu:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
