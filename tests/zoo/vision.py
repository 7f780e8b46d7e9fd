"""Images and videos, alone or with text beside them."""

from __future__ import annotations

from collections.abc import Mapping

from .entry import COMMON, NO_DROPOUT, Entry

VIT = {**COMMON, **NO_DROPOUT, "image_size": 16, "patch_size": 4, "num_labels": 5}
SEGFORMER = {
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [16, 32],
    "patch_sizes": [3, 3],
    "strides": [2, 2],
    "num_attention_heads": [2, 4],
    "mlp_ratios": [2, 2],
    "drop_path_rate": 0.0,
    "classifier_dropout_prob": 0.0,
    "decoder_hidden_size": 16,
    "num_labels": 5,
    **NO_DROPOUT,
}

VISION: Mapping[str, Entry] = {
    "ViT": Entry(
        "ViTForImageClassification",
        {**COMMON, **NO_DROPOUT, "image_size": 16, "patch_size": 4, "num_labels": 5},
        "image",
    ),
    "CLIP": Entry(
        "CLIPModel",
        {
            "text_config": {**COMMON},
            "vision_config": {**COMMON, "image_size": 16, "patch_size": 4},
            "projection_dim": 16,
        },
        "pairs",
        rows_apart=False,
    ),
    "DeiT": Entry("DeiTForImageClassification", VIT, "image", brief=True),
    "DINOv2": Entry("Dinov2ForImageClassification", VIT, "image", brief=True),
    "BEiT": Entry("BeitForImageClassification", {**VIT, "drop_path_rate": 0.0}, "image", brief=True),
    "Swin": Entry(
        "SwinForImageClassification",
        {
            "image_size": 32,
            "patch_size": 4,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [2, 4],
            "window_size": 4,
            "drop_path_rate": 0.1,
            "num_labels": 5,
        },
        "picture",
        brief=True,
    ),
    "ConvNeXt": Entry(
        "ConvNextForImageClassification",
        {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2, "drop_path_rate": 0.1, "num_labels": 5},
        "picture",
        brief=True,
    ),
    "ResNet": Entry(
        "ResNetForImageClassification",
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "num_labels": 5},
        "picture",
        rows_apart=False,
        brief=True,
    ),
    "SegFormer, classes": Entry("SegformerForImageClassification", SEGFORMER, "picture", brief=True),
    "SegFormer, segments": Entry(
        "SegformerForSemanticSegmentation", SEGFORMER, "segments", rows_apart=False, brief=True
    ),
    "PVT v2": Entry(
        "PvtV2ForImageClassification",
        {
            "image_size": 32,
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [2, 1],
            "hidden_sizes": [16, 32],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [2, 4],
            "mlp_ratios": [2, 2],
            "num_labels": 5,
        },
        "picture",
        brief=True,
    ),
    "VideoMAE": Entry(
        "VideoMAEForVideoClassification", {**VIT, "num_frames": 2, "tubelet_size": 2}, "video", brief=True
    ),
    "SigLIP": Entry(
        "SiglipModel",
        {
            "text_config": {**COMMON, "projection_size": 32},
            "vision_config": {**COMMON, "image_size": 16, "patch_size": 4},
        },
        "pairs",
        rows_apart=False,
        brief=True,
    ),
}
