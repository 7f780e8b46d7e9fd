"""Models with a cluster and a batch, and the layout that practice has for them: what plan_large.py plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.planned_nets import Detector, GraphNet, UNet

Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class Case:
    """A model on ``gpus`` devices of a kind, with a batch of ``rows``, and the plan that was ``published`` or is usual
    (with its measured seconds, where known). ``mixed``: float32 parameters with bf16 copies; else all is bf16."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    device: str
    gpus: int
    published: Mapping[str, Any]
    measured: float | None = None
    source: str = ""
    loss: Loss | None = None
    mixed: bool = False
    pinned: Mapping[str, Any] = field(default_factory=dict)

    def model(self) -> nn.Module:
        with torch.device("meta"):
            model = self.build()
        return model if self.mixed else model.to(torch.bfloat16)

    @property
    def decided(self) -> dict[str, Any]:
        """Return the decisions that all plans of this model share."""
        return {**({"precision": "bf16"} if self.mixed else {}), **self.pinned}


def _hf(architecture: str, **config: Any) -> Callable[[], nn.Module]:
    """A transformers architecture with its configuration."""

    return lambda: made_of(architecture, **config)


def made_of(architecture: str, **config: Any) -> nn.Module:
    """A model of a transformers architecture."""
    import transformers

    model_class = getattr(transformers, architecture)
    model: nn.Module = model_class(model_class.config_class(**config))
    return model


def _tokens(rows: int, length: int) -> Callable[[], Any]:
    def batch() -> Any:
        ids = torch.empty(rows, length, dtype=torch.long, device="meta")
        return {"input_ids": ids, "labels": ids}

    return batch


def _classes(rows: int) -> Tensor:
    return torch.empty(rows, dtype=torch.long, device="meta")


def _images(rows: int, size: int) -> Callable[[], Any]:
    return lambda: (torch.empty(rows, 3, size, size, device="meta"), _classes(rows))


def _vit_batch(rows: int) -> Callable[[], Any]:
    return lambda: {"pixel_values": torch.empty(rows, 3, 224, 224, device="meta"), "labels": _classes(rows)}


def _latents(rows: int) -> Callable[[], Any]:
    return lambda: (torch.empty(rows, 4, 64, 64, device="meta"), torch.empty(rows, 4, 64, 64, device="meta"))


def _graphs(rows: int, nodes: int, edges: int, features: int) -> Callable[[], Any]:
    def batch() -> Any:
        ends = torch.empty(rows, 2, edges, dtype=torch.long, device="meta")
        inputs = torch.empty(rows, nodes, features, device="meta"), ends
        return inputs, _classes(rows)

    return batch


def _gpt(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_positions": 2048, "vocab_size": 51200,
            "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}  # fmt: skip


def _llama(layers: int, hidden: int, heads: int, inner: int) -> dict[str, Any]:
    return {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": 8,
            "intermediate_size": inner, "vocab_size": 128256, "max_position_embeddings": 8192,
            "tie_word_embeddings": False}  # fmt: skip


KORTH, DGXC = "Korthikanti et al. 2022, table 5", "NVIDIA DGX Cloud recipes 24.11"
PUBLISHED: Mapping[str, Case] = {
    "GPT-3 175B": Case(
        _hf("GPT2LMHeadModel", **_gpt(96, 12288, 96)), _tokens(64, 2048), "a100-80", 64,
        {"mesh": {"tp": 8, "pp": 8}, "microbatches": 64, "schedule": "interleaved", "virtual_stages": 3,
         "recompute": "selective"}, 13.75, KORTH,
    ),
    "GPT 530B": Case(
        _hf("GPT2LMHeadModel", **_gpt(105, 20480, 128)), _tokens(280, 2048), "a100-80", 280,
        {"mesh": {"tp": 8, "pp": 35}, "microbatches": 280, "schedule": "interleaved", "virtual_stages": 3,
         "recompute": "selective"}, 37.83, KORTH,
    ),
    "GPT 1T": Case(
        _hf("GPT2LMHeadModel", **_gpt(128, 25600, 160)), _tokens(512, 2048), "a100-80", 512,
        {"mesh": {"tp": 8, "pp": 64}, "microbatches": 512, "recompute": "selective"}, 71.49, KORTH,
    ),
    "Llama-3 70B": Case(
        _hf("LlamaForCausalLM", **_llama(80, 8192, 64, 28672)), _tokens(128, 8192), "h100", 64,
        {"mesh": {"dp": 2, "cp": 2, "tp": 4, "pp": 4}, "microbatches": 64, "schedule": "interleaved",
         "virtual_stages": 5, "zero": 1}, 14.72, DGXC,
    ),
    "Llama-3 405B": Case(
        _hf("LlamaForCausalLM", **_llama(126, 16384, 128, 53248)), _tokens(2048, 8192), "h100", 16384,
        {"mesh": {"dp": 128, "tp": 8, "pp": 16}, "microbatches": 16, "schedule": "interleaved", "virtual_stages": 8,
         "zero": 1}, None, "Llama team 2024, table 4",
    ),
    "Mixtral 8x7B": Case(
        _hf("MixtralForCausalLM", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
            num_attention_heads=32, num_key_value_heads=8, num_local_experts=8, num_experts_per_tok=2, vocab_size=32000,
            output_router_logits=False), _tokens(256, 4096), "h100", 64,
        {"mesh": {"ep": 8, "tp": 2, "pp": 4}, "microbatches": 32, "schedule": "interleaved", "virtual_stages": 8,
         "zero": 1, "zero_axes": ["dp", "ep"]}, 3.26, "Megatron-LM's performance tests",
    ),
    "DeepSeek-V3": Case(
        _hf("DeepseekV3ForCausalLM"), _tokens(15360, 4096), "h100", 2048,
        {"mesh": {"dp": 2, "ep": 64, "pp": 16}, "microbatches": 120, "schedule": "zb-v", "virtual_stages": 2, "zero": 1,
         "zero_axes": ["dp", "ep"], "recompute": "selective"}, None, "DeepSeek-AI 2024, section 3.2",
    ),
}  # fmt: skip

LLAMA_8B = _llama(32, 4096, 32, 14336)
_LLAMA_8B = _hf("LlamaForCausalLM", **LLAMA_8B)
_VIT_H = _hf("ViTForImageClassification", hidden_size=1280, num_hidden_layers=32, num_attention_heads=16,
             intermediate_size=5120, patch_size=14, image_size=224, num_labels=1000)  # fmt: skip
FSDP, DDP = "FSDP, as most train it", "DDP, as most train it"
USUAL: Mapping[str, Case] = {
    "Llama-3 8B": Case(
        _LLAMA_8B, _tokens(64, 8192), "h100", 8,
        {"mesh": {"dp": 8}, "microbatches": 8, "zero": 3, "recompute": "selective"}, None, FSDP, mixed=True,
    ),
    "Llama-3 70B, mixed": Case(
        _hf("LlamaForCausalLM", **_llama(80, 8192, 64, 28672)), _tokens(128, 8192), "h100", 64,
        {"mesh": {"dp": 64}, "microbatches": 2, "zero": 3, "recompute": "full"}, None, FSDP, mixed=True,
    ),
    "Llama-3 8B, 1M tokens": Case(
        _LLAMA_8B, _tokens(4, 2**20), "h100", 64,
        {"mesh": {"cp": 8, "tp": 8}, "microbatches": 4, "context": "ring", "recompute": "full", "zero": 1,
         "zero_axes": ["cp"]}, None, "tp in a node, cp over nodes, all recomputed", mixed=True,
    ),
    "ViT-H": Case(
        _VIT_H, _vit_batch(1024), "a100-80", 8, {"mesh": {"dp": 8}, "microbatches": 2}, None, DDP, mixed=True,
    ),
    "GPT-2": Case(
        _hf("GPT2LMHeadModel", attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0), _tokens(480, 1024), "rtx-4090", 2,
        {"mesh": {"dp": 2}, "microbatches": 20}, None, DDP, mixed=True,
    ),
}  # fmt: skip
NETS: Mapping[str, Case] = {
    "U-Net": Case(
        UNet, _latents(256), "a100-80", 8, {"mesh": {"dp": 8}, "microbatches": 2}, None, DDP, F.mse_loss, mixed=True,
    ),
    "BERT-large": Case(
        _hf("BertForMaskedLM", hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0), _tokens(512, 512), "a100-80", 8,
        {"mesh": {"dp": 8}, "microbatches": 2}, None, DDP, mixed=True,
    ),
    "OLMoE 7B": Case(
        _hf("OlmoeForCausalLM", num_experts=64, num_experts_per_tok=8), _tokens(128, 4096), "a100-80", 8,
        {"mesh": {"dp": 8}, "microbatches": 16, "zero": 3, "recompute": "selective"}, None, FSDP, mixed=True,
    ),
    "graph network": Case(
        lambda: GraphNet(64, 10), _graphs(1024, 128, 512, 64), "a100-80", 8,
        {"mesh": {"dp": 8}, "microbatches": 1}, None, DDP, F.cross_entropy, mixed=True,
    ),
    "Darknet-53": Case(
        Detector, _images(512, 256), "a100-80", 8, {"mesh": {"dp": 8}, "microbatches": 1}, None, DDP, F.cross_entropy,
        mixed=True,
    ),
}  # fmt: skip
SETS = {"published": PUBLISHED, "usual": USUAL, "nets": NETS}
CASES: Mapping[str, Case] = {**PUBLISHED, **USUAL, **NETS}
