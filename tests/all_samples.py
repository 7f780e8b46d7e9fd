"""Calls of every operator that has a sharding rule, those of features among them."""

from __future__ import annotations

from .fp8_samples import FP8_SAMPLES
from .generation_samples import GENERATION_SAMPLES
from .operator_samples import SAMPLES as CORE_SAMPLES

SAMPLES = CORE_SAMPLES | FP8_SAMPLES | GENERATION_SAMPLES
