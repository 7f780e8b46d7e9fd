"""Models that read images in their text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .entry import COMMON, GROUPED, IMAGE, Entry

TOWER = {**COMMON, "image_size": 16, "patch_size": 4}
LLAMA = {**GROUPED, "model_type": "llama"}


class OneGrid(nn.Module):
    """Qwen2-VL for images of one size: how many patches an image has is a Python value, not a tensor of the batch, and
    patches [rows, patches, values] and positions [rows, 3, length] have rows."""

    def __init__(self, model: nn.Module, grid: tuple[int, int, int] = (1, 4, 4)) -> None:
        super().__init__()
        self.model, self.grid = model, grid

    def forward(self, pixel_values: Tensor, position_ids: Tensor, **batch: Tensor) -> Any:
        grids = torch.tensor([self.grid] * len(pixel_values))
        images = {"pixel_values": pixel_values.flatten(0, 1), "image_grid_thw": grids}
        return self.model(**images, position_ids=position_ids.transpose(0, 1), **batch)


class OneSize(nn.Module):
    """Mistral 3 for images of one size, which is a Python value."""

    def __init__(self, model: nn.Module, size: tuple[int, int] = (16, 16)) -> None:
        super().__init__()
        self.model, self.size = model, size

    def forward(self, pixel_values: Tensor, **batch: Tensor) -> Any:
        return self.model(pixel_values=pixel_values, image_sizes=[self.size] * len(pixel_values), **batch)


class NoPadding(nn.Module):
    """Idefics3 for images that all are there, without padding: nothing has to be picked by value."""

    def __init__(self, model: Any, patches: tuple[int, int] = (4, 4)) -> None:
        super().__init__()
        self.model, self.patches = model, patches

    def forward(self, pixel_values: Tensor, **batch: Tensor) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        inner = self.model.model
        seen = torch.ones(len(pixel_values), *self.patches, dtype=torch.bool, device=pixel_values.device)
        found = inner.vision_model(pixel_values=pixel_values, patch_attention_mask=seen).last_hidden_state
        images = BaseModelOutputWithPooling(pooler_output=inner.connector(found))
        return self.model(mm_encoder_outputs={"image": images}, **batch)


VISION_LANGUAGE: Mapping[str, Entry] = {
    "LLaVA": Entry(
        "LlavaForConditionalGeneration",
        {
            "vision_config": {**TOWER, "model_type": "clip_vision_model"},
            "text_config": LLAMA,
            "image_token_index": IMAGE,
            "image_token_id": IMAGE,
            "vision_feature_layer": -1,
        },
        "image and text",
        brief=True,
    ),
    "PaliGemma": Entry(
        "PaliGemmaForConditionalGeneration",
        {
            "vision_config": {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
            "text_config": {**GROUPED, "model_type": "gemma"},
            "image_token_index": IMAGE,
            "image_token_id": IMAGE,
            "projection_dim": 32,
            "hidden_size": 32,
        },
        "image and text",
        brief=True,
    ),
    "Gemma 3 with images": Entry(
        "Gemma3ForConditionalGeneration",
        {
            "vision_config": {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
            "text_config": {**GROUPED, "model_type": "gemma3_text", "sliding_window": 4, "query_pre_attn_scalar": 8},
            "image_token_index": IMAGE,
            "image_token_id": IMAGE,
            "mm_tokens_per_image": 4,
            "boi_token_index": 6,
            "eoi_token_index": 7,
        },
        "typed image and text",
        brief=True,
    ),
    "InternVL": Entry(
        "InternVLForConditionalGeneration",
        {
            "vision_config": {**TOWER, "model_type": "internvl_vision", "image_size": [16, 16], "patch_size": [4, 4]},
            "text_config": {**GROUPED, "model_type": "qwen2"},
            "image_token_id": IMAGE,
            "image_seq_length": 4,
            "downsample_ratio": 0.5,
        },
        "pooled image and text",
        brief=True,
    ),
    "Qwen2-VL": Entry(
        "Qwen2VLForConditionalGeneration",
        {
            "vision_config": {
                "depth": 2,
                "embed_dim": 32,
                "hidden_size": 32,
                "num_heads": 4,
                "mlp_ratio": 2,
                "patch_size": 4,
            },
            "text_config": {
                **GROUPED,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]},
            },
            "image_token_id": IMAGE,
            "video_token_id": 6,
            "vision_start_token_id": 7,
            "vision_end_token_id": 7,
        },
        "patches and text",
        prepare=OneGrid,
        rows_apart=False,
        brief=True,
    ),
    "Idefics3": Entry(
        "Idefics3ForConditionalGeneration",
        {
            "vision_config": {**TOWER, "model_type": "idefics3_vision"},
            "text_config": LLAMA,
            "image_token_id": IMAGE,
            "scale_factor": 2,
        },
        "pooled image and text",
        prepare=NoPadding,
        brief=True,
    ),
    "Mistral 3": Entry(
        "Mistral3ForConditionalGeneration",
        {
            "vision_config": {
                **TOWER,
                "model_type": "pixtral",
                "head_dim": 8,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
            },
            "text_config": {**GROUPED, "model_type": "mistral"},
            "image_token_index": IMAGE,
            "image_token_id": IMAGE,
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
        },
        "pooled image and text",
        prepare=OneSize,
        rows_apart=False,
        brief=True,
    ),
}
