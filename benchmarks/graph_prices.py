"""The price of a module's graph beside the closed form of the same model: both list the same kernels.

    python benchmarks/graph_prices.py                       # ten models in six layouts on A100 and H100
    python benchmarks/graph_prices.py --only qwen --gpu h100 --parts

Modules of transformers are built on the meta device in bf16, with four layers, since time is linear in
them. The graph's price is ``quintnet.estimate``; the closed form has this compiler's kernels
(``cost_models/kernel_set.py``).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import quintnet
from benchmarks.closed_forms.kernel_set import QUINTNET, KernelSet, Passes
from benchmarks.closed_forms.step_time import StepModel
from benchmarks.closed_forms.transformer import Decoder, ParallelLayout
from quintnet_compiler.cost_models.hardware import hardware
from quintnet_compiler.planner.estimate import Estimate

LAYERS = 4  # of fewer, the first and the last decide how all are split
ROWS = 2  # of a microbatch on a rank
# AdamW on parameters of 2 bytes
BF16 = replace(QUINTNET, optimizer_bytes=14)
# GPT-2 of transformers: queries, keys and values are one product, and its GELU is eight operators (eleven backward)
GPT2 = replace(BF16, norm=Passes(2, 5, 1, 4), joined=True, activation=Passes(18, 28, 8, 11))


@dataclass(frozen=True)
class Case:
    """A module of transformers and the decoder that it is."""

    architecture: str
    decoder: Decoder
    kernels: KernelSet = BF16
    options: Mapping[str, Any] = field(default_factory=dict)

    def module(self, layers: int) -> nn.Module:
        import transformers

        model_class, d = getattr(transformers, self.architecture), self.decoder
        if self.architecture == "GPT2LMHeadModel":
            sizes: dict[str, Any] = {"n_layer": layers, "n_embd": d.hidden, "n_head": d.heads, "n_positions": d.seq,
                                     "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}  # fmt: skip
        else:
            sizes = {"num_hidden_layers": layers, "hidden_size": d.hidden, "intermediate_size": d.ffn,
                     "num_attention_heads": d.heads, "num_key_value_heads": d.kv, "max_position_embeddings": d.seq,
                     "tie_word_embeddings": d.tied}  # fmt: skip
        with torch.device("meta"):
            model: nn.Module = model_class(model_class.config_class(vocab_size=d.vocab, **sizes, **self.options))
        return model.to(torch.bfloat16)


def _llama(hidden: int, ffn: int, heads: int, kv: int, vocab: int, seq: int, tied: bool = False) -> Decoder:
    return Decoder(LAYERS, hidden, ffn, heads, vocab, seq, kv, gated=True, tied=tied, biases=False, rotary=True)


def _gpt(hidden: int, heads: int, seq: int) -> Decoder:
    return Decoder(LAYERS, hidden, 4 * hidden, heads, 50304, seq, learned_positions=seq)


CASES: Mapping[str, Case] = {
    "Llama-3.2 1B": Case("LlamaForCausalLM", _llama(2048, 8192, 32, 8, 128256, 8192, True)),
    "Llama-3 8B": Case("LlamaForCausalLM", _llama(4096, 14336, 32, 8, 128256, 8192)),
    "Llama-3 70B": Case("LlamaForCausalLM", _llama(8192, 28672, 64, 8, 128256, 8192)),
    "Llama 7B": Case("LlamaForCausalLM", _llama(4096, 11008, 32, 32, 32000, 2048)),
    "Mistral 7B": Case(
        "MistralForCausalLM", _llama(4096, 14336, 32, 8, 32000, 4096), options={"sliding_window": None}
    ),
    "Qwen2 7B": Case("Qwen2ForCausalLM", _llama(3584, 18944, 28, 4, 152064, 4096)),
    "Qwen3 8B": Case(
        "Qwen3ForCausalLM", replace(_llama(4096, 12288, 32, 8, 151936, 4096), head_norms=True, head_dim=128),
        options={"head_dim": 128},
    ),
    "GPT-2": Case("GPT2LMHeadModel", _gpt(768, 12, 1024), GPT2),
    "GPT-2 XL": Case("GPT2LMHeadModel", _gpt(1600, 25, 1024), GPT2),
    "GPT-3 175B": Case("GPT2LMHeadModel", _gpt(12288, 96, 2048), GPT2),
}  # fmt: skip
# One stage of the pipeline begins at each layer, as closed forms have it.
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "dp 8": {"mesh": {"dp": 8}},
    "dp 8, ZeRO 1": {"mesh": {"dp": 8}, "zero": 1},
    "dp 8, ZeRO 3, full recompute": {"mesh": {"dp": 8}, "zero": 3, "recompute": "full"},
    "tp 8": {"mesh": {"tp": 8}},
    "dp 4, tp 2": {"mesh": {"dp": 4, "tp": 2}, "microbatches": 2},
    "pp 4": {"mesh": {"pp": 4}, "microbatches": 8},
    "cp 4, ring": {"mesh": {"cp": 4}, "context": "ring", "recompute": "full"},
    "cp 4, ring in causal order": {
        "mesh": {"cp": 4}, "context": "ring", "context_load_balance": False, "recompute": "full",
    },
    "cp 4, gathered keys": {"mesh": {"cp": 4}, "context": "all_gather", "recompute": "full"},
    "cp 4, heads": {"mesh": {"cp": 4}, "context": "ulysses", "recompute": "full"},
}  # fmt: skip
CONTEXT = 131072  # positions where ranks split them


@dataclass(frozen=True)
class Pair:
    """Prices of the same step, in seconds."""

    graph: Estimate
    closed: StepModel

    @property
    def error(self) -> float:
        """Return the error of the graph's price relative to the closed form."""
        return self.graph.seconds / self.closed.step().seconds - 1


def pair(name: str, layout: str, gpu: str) -> Pair:
    """Price one model in one layout both ways.

    The host takes no time: closed forms list the kernels of layers, and not those that prepare a batch.
    """
    case, plan = CASES[name], dict(LAYOUTS[layout])
    sizes = {axis: plan["mesh"].get(axis, 1) for axis in ("dp", "tp", "pp", "cp")}
    if sizes["cp"] > 1:
        case = replace(case, decoder=replace(case.decoder, seq=CONTEXT))
    microbatches = plan.get("microbatches", 1)
    if sizes["pp"] > 1:
        where = "transformer.h" if case.architecture.startswith("GPT2") else "model.layers"
        plan["stages"] = [f"{where}.{number}" for number in range(1, LAYERS)]
    rows = (1 if sizes["cp"] > 1 else ROWS) * sizes["dp"] * microbatches
    device = hardware(gpu)
    device = replace(device, efficiency=replace(device.efficiency, host_seconds=0.0))
    cluster = quintnet.Cluster(device, gpus_per_node=math.prod(sizes.values()))
    ids = torch.empty(rows, case.decoder.seq, dtype=torch.long, device="meta")
    graph = quintnet.estimate(case.module(LAYERS), cluster, {"input_ids": ids, "labels": ids}, plan)
    described = ParallelLayout(
        **sizes, microbatch=rows // (sizes["dp"] * microbatches), global_batch=rows,
        sequence_parallel=sizes["tp"] > 1, zero=plan.get("zero", 0),
        recompute=plan.get("recompute", "none"), gradient_dtype="bf16", kernels=case.kernels,
        context=plan.get("context", "ring"),
        balanced=plan.get("context") == "ring" and plan.get("context_load_balance", True),
    )  # fmt: skip
    return Pair(graph, StepModel(case.decoder, described, cluster))


def applies(name: str, layout: str) -> bool:
    """Return whether the closed form describes how the compiler splits the module.

    It splits as Megatron does, which needs heads that divide. The features of Qwen3's norms over two ranks are split,
    too. Learned positions end before long contexts.
    """
    decoder, tp = CASES[name].decoder, LAYOUTS[layout]["mesh"].get("tp", 1)
    if "cp" in LAYOUTS[layout]["mesh"] and decoder.learned_positions:
        return False
    return decoder.heads % tp == 0 and decoder.kv % tp == 0 and not (tp == 2 and decoder.head_norms)


def pairs(only: str, gpus: list[str]) -> Iterator[tuple[str, str, str]]:
    for gpu in gpus:
        for name in CASES:
            if only.lower() in name.lower():
                yield from ((name, layout, gpu) for layout in LAYOUTS if applies(name, layout))


def parts(prices: Pair) -> str:
    """Return where the time is, in milliseconds: the graph's, and the closed form's."""
    graph, step = prices.graph, prices.closed.step()
    rows = (
        ("pipeline", graph.pipeline, step.pipeline), ("gradients", graph.gradients, step.data_parallel),
        ("optimizer", graph.optimizer, step.optimizer),
    )  # fmt: skip
    return ", ".join(f"{name} {1e3 * a:.2f} and {1e3 * b:.2f}" for name, a, b in rows)


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--only", default="", help="models whose name has this in it")
    options.add_argument("--gpu", nargs="+", default=["a100", "h100"])
    options.add_argument("--parts", action="store_true", help="where the time is, too")
    args = options.parse_args()
    torch.set_num_threads(1)
    errors = []
    for name, layout, gpu in pairs(args.only, args.gpu):
        prices = pair(name, layout, gpu)
        errors.append(abs(prices.error))
        graph, closed = 1e3 * prices.graph.seconds, 1e3 * prices.closed.step().seconds
        print(f"{gpu} {name:13s} {layout:29s} {graph:9.2f} ms {closed:9.2f} ms {100 * prices.error:+5.1f}%", flush=True)
        if args.parts:
            print(f"    {parts(prices)}")
    print(f"{len(errors)} pairs: mean {100 * sum(errors) / len(errors):.2f}%, largest {100 * max(errors):.2f}%")


if __name__ == "__main__":
    main()
