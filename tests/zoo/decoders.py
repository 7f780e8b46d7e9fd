"""Causal language models."""

from __future__ import annotations

from collections.abc import Mapping

from .entry import COMMON, GROUPED, VOCAB, Entry

GPT = {
    "vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

DECODERS: Mapping[str, Entry] = {
    "GPT-2": Entry("GPT2LMHeadModel", GPT),
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
    "Gemma": Entry("GemmaForCausalLM", GROUPED, brief=True),
    "Falcon": Entry(
        "FalconForCausalLM",
        {**COMMON, "new_decoder_architecture": False, "hidden_dropout": 0.0, "attention_dropout": 0.0},
        brief=True,
    ),
    "BLOOM": Entry(
        "BloomForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4, "pad_token_id": 0},
        brief=True,
    ),
    "MPT": Entry(
        "MptForCausalLM",
        {"vocab_size": VOCAB, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 32},
        brief=True,
    ),
    "GPT-J": Entry("GPTJForCausalLM", {**GPT, "rotary_dim": 4}, brief=True),
    "GPT-Neo": Entry(
        "GPTNeoForCausalLM",
        {**COMMON, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4},
        brief=True,
    ),
    "Phi": Entry("PhiForCausalLM", COMMON, brief=True),
    "StableLM": Entry("StableLmForCausalLM", GROUPED, brief=True),
    "Cohere 2": Entry("Cohere2ForCausalLM", {**GROUPED, "sliding_window": 4}, brief=True),
    "OLMo 2": Entry("Olmo2ForCausalLM", GROUPED, brief=True),
    "Granite": Entry("GraniteForCausalLM", GROUPED, brief=True),
    "GLM-4": Entry("Glm4ForCausalLM", GROUPED, brief=True),
    "SmolLM3": Entry("SmolLM3ForCausalLM", GROUPED, brief=True),
    "EXAONE 4": Entry("Exaone4ForCausalLM", {**GROUPED, "sliding_window": 4}, brief=True),
    "Apertus": Entry("ApertusForCausalLM", GROUPED, brief=True),
}
