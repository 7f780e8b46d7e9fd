"""What rows leave open about models that are known by name: from their configs, as their makers publish them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# Latent attention of DeepSeek-V2 and V3 and of models made after them.
_LATENT = {"head_dim": 192, "query_rank": 1536, "kv_rank": 512, "rotary_width": 64, "value_width": 128}
# A pattern of names; columns of a row, used where it leaves them blank; fields of the Decoder.
KNOWN: tuple[tuple[str, Mapping[str, int], Mapping[str, Any]], ...] = (
    (r"deepseek[- ]?v?2[- ]?lite",
     {"n_layers": 27, "hidden": 2048, "ffn_hidden": 10944, "n_heads": 16, "vocab": 102400, "n_experts": 64,
      "top_k": 6, "moe_ffn_hidden": 1408},
     {**_LATENT, "query_rank": 0, "dense_layers": 1, "shared_ffn": 2 * 1408}),
    (r"deepseek[- ]?v?2",
     {"n_layers": 60, "hidden": 5120, "ffn_hidden": 12288, "n_heads": 128, "vocab": 102400, "n_experts": 160,
      "top_k": 6, "moe_ffn_hidden": 1536},
     {**_LATENT, "dense_layers": 1, "shared_ffn": 2 * 1536}),
    (r"deepseek",
     {"n_layers": 61, "hidden": 7168, "ffn_hidden": 18432, "n_heads": 128, "vocab": 129280, "n_experts": 256,
      "top_k": 8, "moe_ffn_hidden": 2048},
     {**_LATENT, "dense_layers": 3, "shared_ffn": 2048}),
    (r"kimi",
     {"n_layers": 61, "hidden": 7168, "ffn_hidden": 18432, "n_heads": 64, "vocab": 163840, "n_experts": 384,
      "top_k": 8, "moe_ffn_hidden": 2048},
     {**_LATENT, "dense_layers": 1, "shared_ffn": 2048}),
    (r"moonlight",
     {"n_layers": 27, "hidden": 2048, "ffn_hidden": 11264, "n_heads": 16, "vocab": 163840, "n_experts": 64,
      "top_k": 6, "moe_ffn_hidden": 1408},
     {**_LATENT, "query_rank": 0, "dense_layers": 1, "shared_ffn": 2 * 1408}),
    (r"gpt[- ]?oss", {}, {"head_dim": 64, "window": 128, "windowed": 1 / 2, "sinks": True, "biases": True}),
    (r"llama[- _]?4.*maverick", {},
     {"shared_ffn": 8192, "window": 8192, "windowed": 3 / 4, "expert_step": 2}),
    (r"llama[- _]?4", {}, {"shared_ffn": 8192, "window": 8192, "windowed": 3 / 4}),
    (r"qwen2[- _]?57b", {}, {"shared_ffn": 20480, "shared_gate": True}),
    (r"qwen1\.5[- _]?moe", {}, {"shared_ffn": 5632, "shared_gate": True}),
    (r"gemma[- _]?2", {}, {"window": 4096, "windowed": 1 / 2}),
    (r"gemma[- _]?3", {}, {"window": 1024, "windowed": 5 / 6}),
    (r"mistral[- _]?7b", {}, {"window": 4096, "windowed": 1.0}),
    (r"qwen[- _]?3", {}, {"head_dim": 128, "head_norms": True}),
)  # fmt: skip
# Sources that train DeepSeek-V3 with the layer that predicts one token further (their FLOPs per token count it).
FURTHER = ("MBR", "DGXC", "CARD")


def columns_of(name: str) -> Mapping[str, str]:
    """A row's columns of the model of this name, where a row leaves them blank."""
    return {column: str(number) for column, number in _known(name)[0].items()}


def fields_of(name: str, source: str, layers: int) -> Mapping[str, Any]:
    """Fields of the Decoder of the model of this name."""
    fields = dict(_known(name)[1])
    if "windowed" in fields:
        fields["windowed"] = int(fields["windowed"] * layers)
    if re.search(r"deepseek[- ]?v?3", name.lower()) and source in FURTHER and "w/o MTP" not in name:
        fields["predicted"] = 1
    return fields


def _known(name: str) -> tuple[Mapping[str, int], Mapping[str, Any]]:
    for pattern, columns, fields in KNOWN:
        if re.search(pattern, name.lower()):
            return columns, fields
    return MappingProxyType({}), MappingProxyType({})
