"""What the feature of 8-bit products gives to the compiler."""

from __future__ import annotations

import torch

from quintnet_compiler.features import FEATURES
from quintnet_compiler.features.fp8.eight_bits import EightBits
from quintnet_compiler.features.fp8.feature import FP8
from quintnet_compiler.features.fp8.ops.scaled_groups import group_max, scaled_expert_linear
from quintnet_compiler.features.fp8.ops.scaled_products import block_max, block_scale, scaled_cast, scaled_matmul
from quintnet_compiler.ir.plan import Plan, precision_of
from quintnet_compiler.ops.catalog import spec_of
from quintnet_compiler.ops.experts.grouped_rows import grouped_bias_grad, grouped_linear
from quintnet_compiler.ops.rules.work import work_of

from ..feature_settings import setting_of


def test_it_is_listed_and_its_precision_computes_the_rest_in_16_bits() -> None:
    assert FP8 in FEATURES
    assert precision_of(Plan(precision="fp8")).compute is torch.bfloat16
    (rewrite,) = FP8.rewrites
    made = [rewrite.make(setting_of(Plan(precision=precision)), None) for precision in ("fp8", "bf16")]
    assert isinstance(made[0], EightBits) and made[1] is None


def test_its_operators_say_what_passes_ask() -> None:
    assert [spec_of(op).cast_step for op in (block_max, block_scale, scaled_cast)] == ["largest", "scale", "cast"]
    assert work_of(scaled_matmul) == work_of(scaled_expert_linear) == "matmul" and work_of(group_max) == "memory"
    assert spec_of(scaled_expert_linear).priced_as is grouped_linear
    assert spec_of(group_max).priced_as is grouped_bias_grad
    assert spec_of(scaled_matmul).priced_as is None and spec_of(scaled_matmul).operand_dtype
    assert spec_of(scaled_expert_linear).by_expert and spec_of(scaled_expert_linear).exchanges
    assert spec_of(scaled_expert_linear).no_copies == "multiplies 8-bit numbers"
    assert spec_of(scaled_matmul).unpadded and not spec_of(scaled_matmul).keep
