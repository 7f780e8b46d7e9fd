"""Mixtures of experts."""

from __future__ import annotations

from collections.abc import Mapping

from .entry import COMMON, GROUPED, Entry

MOE = {**GROUPED, "num_experts_per_tok": 2}

MIXTURES: Mapping[str, Entry] = {
    "Mixtral": Entry("MixtralForCausalLM", {**MOE, "num_local_experts": 4}),
    "Qwen3-MoE": Entry(
        "Qwen3MoeForCausalLM", {**MOE, "num_experts": 4, "moe_intermediate_size": 16, "norm_topk_prob": True}
    ),
    "DeepSeek-V3": Entry(
        "DeepseekV3ForCausalLM",
        {
            **COMMON,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "moe_intermediate_size": 16,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 8,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "gpt-oss": Entry(
        "GptOssForCausalLM",
        {
            **GROUPED,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
            "attention_dropout": 0.0,
        },
    ),
    "Qwen2-MoE": Entry(
        "Qwen2MoeForCausalLM",
        {**MOE, "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 64},
        brief=True,
    ),
    "OLMoE": Entry("OlmoeForCausalLM", {**MOE, "num_experts": 4}, brief=True),
    "GraniteMoE": Entry("GraniteMoeForCausalLM", {**MOE, "num_local_experts": 4}, brief=True),
    "Llama 4": Entry(
        "Llama4ForCausalLM",
        {
            **GROUPED,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "attention_chunk_size": 4,
            "intermediate_size_mlp": 64,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0],
        },
        brief=True,
    ),
    "PhiMoE": Entry(
        "PhimoeForCausalLM",
        {**MOE, "num_local_experts": 4, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
        brief=True,
    ),
}
