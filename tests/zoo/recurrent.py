"""State-space and recurrent models, and those that mix them with attention."""

from __future__ import annotations

from collections.abc import Mapping

from .entry import COMMON, GROUPED, Entry

RECURRENT: Mapping[str, Entry] = {
    "Mamba": Entry("MambaForCausalLM", {**COMMON, "state_size": 4, "time_step_rank": 4}, "causal", brief=True),
    "Mamba-2": Entry(
        "Mamba2ForCausalLM",
        {**COMMON, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 4},
        brief=True,
    ),
    "RWKV": Entry(
        "RwkvForCausalLM", {**COMMON, "attention_hidden_size": 32, "context_length": 32}, "causal", brief=True
    ),
    "Jamba": Entry(
        "JambaForCausalLM",
        {
            **GROUPED,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "mamba_d_state": 4,
            "mamba_dt_rank": 4,
            "use_mamba_kernels": False,
        },
        brief=True,
    ),
    "LFM2": Entry("Lfm2ForCausalLM", {**GROUPED, "layer_types": ["conv", "full_attention"]}, brief=True),
    "Qwen3-Next": Entry(
        "Qwen3NextForCausalLM",
        {
            **GROUPED,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        brief=True,
    ),
}
