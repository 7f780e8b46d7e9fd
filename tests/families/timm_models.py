"""Models of timm, by their own classes, in small sizes."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from ..frontier import Case
from .pieces import CLASSES, Build, classifier


def _timm(path: str, **options: Any) -> Build:
    """``path``: module and class. Options that are ``Part``s are names of the same module."""

    def build() -> nn.Module:
        module = importlib.import_module(f"timm.models.{path.partition('.')[0]}")
        given = {key: x.of(module) if isinstance(x, _Part) else x for key, x in options.items()}
        found: nn.Module = getattr(module, path.partition(".")[2])(num_classes=CLASSES, **given)
        return found

    return build


class _Part:
    """What a module of timm calls ``name``, with ``options`` if there are any."""

    def __init__(self, name: str, **options: Any) -> None:
        self.name, self.options = name, options

    def of(self, module: Any) -> Any:
        found = getattr(module, self.name)
        return partial(found, **self.options) if self.options else found


class _Parts(_Part):
    """Several."""

    def __init__(self, *names: str) -> None:
        super().__init__("")
        self.names = names

    def of(self, module: Any) -> Any:
        return [getattr(module, name) for name in self.names]


class _Made(_Part):
    """What it makes with the options."""

    def of(self, module: Any) -> Any:
        return getattr(module, self.name)(**self.options)


def _whole(name: str, **options: Any) -> Build:
    """One of those that timm registers for tests."""

    def build() -> nn.Module:
        import timm

        found: nn.Module = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
        return found

    return build


PATCHES: Mapping[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 16, "drop_path_rate": 0.3}
HEADS: Mapping[str, Any] = {**PATCHES, "depth": 2, "num_heads": 2}
WINDOWS: Mapping[str, Any] = {
    "img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 8, "depths": (2, 2), "num_heads": (1, 2),
}  # fmt: skip
FOUR: Mapping[str, Any] = {"depths": (1, 1, 1, 1), "drop_path_rate": 0.3}
DIMS, MANY = (8, 8, 16, 16), (1, 1, 2, 2)
RESNET: Mapping[str, Any] = {
    "layers": [1, 1, 1, 1], "channels": (16, 16, 32, 32), "stem_width": 8, "drop_path_rate": 0.2,
}  # fmt: skip

CASES: Mapping[str, Case] = {
    "ConvNeXt": classifier(_timm("convnext.ConvNeXt", dims=DIMS, **FOUR, drop_rate=0.1), 64),
    "ViT": classifier(_timm("vision_transformer.VisionTransformer", **HEADS)),
    "EfficientNet": classifier(_whole("test_efficientnet", drop_path_rate=0.3)),
}  # fmt: skip
