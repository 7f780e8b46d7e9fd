"""Hugging Face models in tiny configurations: what a table of models and axes is made from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import quintnet

VOCAB, LENGTH = 64, 8


class InDouble(TorchFunctionMode):
    """Norms, softmax, rotary tables and losses that a model casts to float32 stay in float64, so that rounding hides
    nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {key: torch.float64 if a is torch.float32 else a for key, a in (kwargs or {}).items()}
        return func(*args, **kwargs)


@dataclass(frozen=True)
class Entry:
    """A model of transformers. ``kind``: the inputs it takes; ``config``: what differs from :data:`COMMON`."""

    architecture: str
    config: Mapping[str, Any]
    kind: str = "decoder"

    def build(self) -> nn.Module:
        """The model in float64, without dropout, with all parameters away from zero."""
        import transformers

        model_class = getattr(transformers, self.architecture)
        torch.manual_seed(0)
        config = model_class.config_class(**self.config)
        config._experts_implementation = "eager"  # the others have no float64
        model: nn.Module = model_class(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        return model.double()

    def batch(self, rows: int) -> dict[str, Tensor]:
        return BATCHES[self.kind](rows)


def _ids(rows: int, length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def _labels(rows: int, length: int = LENGTH) -> Tensor:
    labels = _ids(rows, length, seed=1)
    labels[0, : length // 2] = -100  # spread unevenly over ranks and microbatches
    labels[-1, 2:] = -100
    return labels


def _padding(rows: int, length: int = LENGTH) -> Tensor:
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[1::2, length - 3 :] = 0
    return mask


def _images(rows: int, *shape: int) -> Tensor:
    return torch.randn(rows, *shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


BATCHES: Mapping[str, Callable[[int], dict[str, Tensor]]] = {
    "decoder": lambda rows: {"input_ids": _ids(rows), "attention_mask": _padding(rows), "labels": _labels(rows)},
    "seq2seq": lambda rows: {"input_ids": _ids(rows), "attention_mask": _padding(rows), "labels": _labels(rows)},
    "image": lambda rows: {"pixel_values": _images(rows, 3, 16, 16), "labels": torch.arange(rows) % 5},
    "speech": lambda rows: {"input_features": _images(rows, 16, 32), "labels": _labels(rows)},
    "pairs": lambda rows: {
        "input_ids": _ids(rows), "pixel_values": _images(rows, 3, 16, 16), "attention_mask": _padding(rows),
        "return_loss": True,
    },
}  # fmt: skip

COMMON = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**COMMON, "num_key_value_heads": 2, "head_dim": 8}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MOE = {**GROUPED, "num_experts_per_tok": 2}

ZOO: Mapping[str, Entry] = {
    "GPT-2": Entry(
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "resid_pdrop": 0.0,
            "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        },
    ),
    "GPT-NeoX": Entry("GPTNeoXForCausalLM", COMMON),
    "OPT": Entry("OPTForCausalLM", {**COMMON, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0}),
    "Llama": Entry("LlamaForCausalLM", GROUPED),
    "Mistral": Entry("MistralForCausalLM", {**GROUPED, "sliding_window": 4}),
    "Qwen2": Entry("Qwen2ForCausalLM", GROUPED),
    "Qwen3": Entry("Qwen3ForCausalLM", GROUPED),
    "Gemma 2": Entry("Gemma2ForCausalLM", {**GROUPED, "sliding_window": 4, "query_pre_attn_scalar": 8}),
    "Gemma 3": Entry("Gemma3ForCausalLM", {**GROUPED, "sliding_window": 4, "query_pre_attn_scalar": 8}),
    "Phi-3": Entry("Phi3ForCausalLM", GROUPED),
    "OLMo": Entry("OlmoForCausalLM", GROUPED),
    "BERT": Entry("BertForMaskedLM", {**COMMON, **NO_DROPOUT}),
    "RoBERTa": Entry("RobertaForMaskedLM", {**COMMON, **NO_DROPOUT}),
    "T5": Entry(
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
            "dropout_rate": 0.0, "decoder_start_token_id": 0,
        },
        "seq2seq",
    ),
    "ViT": Entry(
        "ViTForImageClassification",
        {**COMMON, **NO_DROPOUT, "image_size": 16, "patch_size": 4, "num_labels": 5},
        "image",
    ),
    "Whisper": Entry(
        "WhisperForConditionalGeneration",
        {
            "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
            "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 16,
            "max_source_positions": 16, "max_target_positions": 32, "dropout": 0.0,
            "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
            "suppress_tokens": None, "begin_suppress_tokens": None,
        },
        "speech",
    ),
    "CLIP": Entry(
        "CLIPModel",
        {
            "text_config": {**COMMON}, "vision_config": {**COMMON, "image_size": 16, "patch_size": 4},
            "projection_dim": 16,
        },
        "pairs",
    ),
    "Mixtral": Entry("MixtralForCausalLM", {**MOE, "num_local_experts": 4}),
    "Qwen3-MoE": Entry(
        "Qwen3MoeForCausalLM", {**MOE, "num_experts": 4, "moe_intermediate_size": 16, "norm_topk_prob": True}
    ),
    "DeepSeek-V3": Entry(
        "DeepseekV3ForCausalLM",
        {
            **COMMON, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
            "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
            "kv_lora_rank": 8, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
        },
    ),
    "gpt-oss": Entry(
        "GptOssForCausalLM",
        {
            **GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"], "attention_dropout": 0.0,
        },
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """A column of the table: a mesh, and how batch, attention and experts are split."""

    axes: Mapping[str, int]
    microbatches: int = 1
    context: str = "all_gather"
    experts: tuple[str, ...] = ()

    def __str__(self) -> str:
        name = " x ".join(f"{axis}{size}" for axis, size in self.axes.items())
        name += f" ({self.context})" if self.context != "all_gather" else ""
        return name + (f", experts over {' and '.join(self.experts)}" if self.experts else "")


SINGLE = (
    Layout({"dp": 2}, 2),
    Layout({"tp": 2}),
    Layout({"cp": 2}),
    Layout({"cp": 2}, context="ulysses"),
    Layout({"cp": 2}, context="ring"),
    Layout({"pp": 2}, 2),
)
COMPOSED = (
    Layout({"pp": 2, "dp": 2, "tp": 2}, 2),
    Layout({"pp": 2, "cp": 2, "tp": 2}, 2),
    Layout({"dp": 2, "cp": 2, "tp": 2}, context="ring"),
)
EXPERTS = (
    Layout({"ep": 2}),
    Layout({"pp": 2, "ep": 2, "tp": 2}, 2),
    Layout({"dp": 2, "cp": 2}, experts=("dp", "cp")),
    Layout({"pp": 2, "dp": 2, "cp": 2, "tp": 2}, 2, experts=("dp",)),
)


@dataclass(frozen=True)
class Outcome:
    """The largest relative error of the loss, the outputs and all gradients in float64, or why there is no program."""

    error: float | None
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.error is not None and self.error < 1e-9


def outcome(name: str, layout: Layout) -> Outcome:
    """Compile a model for a layout, and compare all ranks with the unsplit model over two optimizer steps."""
    entry = ZOO[name]
    options: dict[str, Any] = {"microbatches": layout.microbatches, "context": layout.context}
    with InDouble():
        try:
            program = quintnet.compile(
                entry.build(), quintnet.Mesh(**layout.axes), entry.batch(8), experts=layout.experts, **options
            )
        except quintnet.CompileError as error:
            return Outcome(None, f"{error.code}: {error.message}")
        report = program.verify()
    return Outcome(report.worst.error, str(report.culprit or ""))


def has_experts(name: str) -> bool:
    return bool({"num_local_experts", "num_experts", "n_routed_experts"} & set(ZOO[name].config))


def columns(name: str) -> tuple[Layout, ...]:
    """The layouts of a model: those with experts where it has some; all samples at once where its loss couples them."""
    found = SINGLE + COMPOSED + (EXPERTS if has_experts(name) else ())
    if ZOO[name].kind == "pairs":
        found = tuple(replace(layout, microbatches=1) for layout in found)
    return found
