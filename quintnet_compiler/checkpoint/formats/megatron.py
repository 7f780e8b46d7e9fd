"""Megatron-core's decoders under the names of Hugging Face's Llama: layers are stacked in one tensor there, and query,
key and value of each group of heads lie beside each other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ...core.errors import CheckpointError
from ...weights.files import shown

MARKS = frozenset({"embedding.word_embeddings.weight", "decoder.final_layernorm.weight"})
FAMILIES = ("llama", "mistral")
_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")
_WHOLE = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
_TOP = {"decoder.final_layernorm.weight": "model.norm.weight"}
_ROWS = {"embedding.word_embeddings.weight": "model.embed_tokens.weight", "output_layer.weight": "lm_head.weight"}


@dataclass(frozen=True)
class DecoderSizes:
    """Numbers of layers, heads, groups of heads, features of a head, and tokens in a configuration."""

    layers: int
    heads: int
    groups: int
    features: int
    tokens: int
    tied: bool

    @classmethod
    def of(cls, config: Path) -> DecoderSizes:
        """Raises: CheckpointError: QN602 for a configuration of another family, or a damaged one."""
        path = config if config.is_file() else config / "config.json"
        try:
            values = json.loads(path.read_bytes())
            if values["model_type"] not in FAMILIES:
                raise ValueError(f"it is of {shown(str(values['model_type']))}, and not of {' or '.join(FAMILIES)}")
            heads = values["num_attention_heads"]
            return cls(
                values["num_hidden_layers"],
                heads,
                values.get("num_key_value_heads") or heads,
                values.get("head_dim") or values["hidden_size"] // heads,
                values["vocab_size"],
                bool(values.get("tie_word_embeddings", False)),
            )
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(
                "QN602",
                f"{shown(str(path))}: {type(error).__name__}: {shown(str(error))}",
                fix="give the config.json of the same model for transformers",
            ) from None


def is_megatron(model: Mapping[str, Tensor]) -> bool:
    return model.keys() >= MARKS


def as_hugging_face(model: Mapping[str, Tensor], config: Path) -> dict[str, Tensor]:
    """Return ``model`` under Hugging Face's names, without the vocabulary's padding.

    Raises:
        CheckpointError: QN602 for tensors that such a decoder does not have, and sizes that are not the
            configuration's.
    """
    sizes = DecoderSizes.of(config)
    renamed: dict[str, Tensor] = {}
    problems: list[str] = []
    for name, x in model.items():
        try:
            renamed |= dict(_renamed(name, x, sizes))
        except (ValueError, RuntimeError) as error:
            problems.append(f"{shown(name)} {tuple(x.shape)}: {error}")
    layers = {name.split(".")[2] for name in renamed if name.startswith("model.layers.")}
    if len(layers) != sizes.layers:
        problems.append(f"there are {len(layers)} layers, and {sizes.layers} in the configuration")
    if sizes.tied == ("lm_head.weight" in renamed):
        problems.append("the configuration ties the embeddings, or Megatron did, and not both")
    elif sizes.tied:
        renamed["lm_head.weight"] = renamed["model.embed_tokens.weight"].clone()
    if problems:
        raise CheckpointError(
            "QN602",
            "\n  ".join(["Megatron's tensors are not those of the configuration:", *problems[:20]]),
            fix="give the config.json of the same model, or keep Megatron's names with --rename",
        )
    return renamed


def _renamed(name: str, x: Tensor, sizes: DecoderSizes) -> Iterator[tuple[str, Tensor]]:
    if name in _TOP:
        yield _TOP[name], x
        return
    if name in _ROWS:
        if x.shape[0] < sizes.tokens:
            raise ValueError(f"the configuration has {sizes.tokens} tokens")
        yield _ROWS[name], x[: sizes.tokens].clone()
        return
    layer = _LAYER.fullmatch(name)
    if layer is None:
        raise ValueError("a Llama has no such tensor")
    number, within = layer.groups()
    stacked = [(int(number), x)] if number is not None else list(enumerate(x))
    for at, tensor in stacked:
        for key, part in _of_layer(within, tensor, sizes):
            yield f"model.layers.{at}.{key}", part.clone()


def _of_layer(name: str, x: Tensor, sizes: DecoderSizes) -> Iterator[tuple[str, Tensor]]:
    if name in _WHOLE:
        yield _WHOLE[name], x
    elif name == "mlp.linear_fc1.weight":
        gate, up = x.chunk(2)
        yield "mlp.gate_proj.weight", gate
        yield "mlp.up_proj.weight", up
    elif name == "self_attention.linear_qkv.weight":
        of_group = sizes.heads // sizes.groups
        packed = x.view(sizes.groups, of_group + 2, sizes.features, x.shape[1])
        for key, part in zip("qkv", torch.split(packed, [of_group, 1, 1], 1), strict=True):
            yield f"self_attn.{key}_proj.weight", part.reshape(-1, x.shape[1])
    else:
        raise ValueError("a Llama has no such tensor")
