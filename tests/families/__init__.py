"""Families of vision, diffusion and graph models: unmodified, with random weights, in small sizes, and how each trains.

Cases by library, which may be missing (``torch`` is not)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ..frontier import Case
from . import diffusers_models, plain_models, timm_models, torchvision_models
from .torchvision_models import WHOLE as WHOLE

FAMILIES: Mapping[str, Mapping[str, Case]] = MappingProxyType(
    {
        "torchvision": torchvision_models.CASES,
        "timm": timm_models.CASES,
        "diffusers": diffusers_models.CASES,
        "torch": plain_models.CASES,
    }
)
