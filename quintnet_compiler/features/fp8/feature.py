"""The record of all that this feature gives to the compiler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ...checks.extensions import ExpertProductCheck, LocalFormCheck
from ...core.sharding import Sharding
from ...ir.builder import GraphBuilder
from ...ir.plan import Plan
from ...ir.program import Axis, Program, Strategy
from ...ops.rules.notation import Rule, rule
from ...passes.frontend.lower_precision import LowerPrecision
from ...passes.lowering.extensions import ExpertProduct, LocalForm
from ..feature import Feature, Rewrite, RewriteSetting
from .checks.eight_bits import check_eight_bits
from .checks.scaled_experts import check_largest, read_product
from .eight_bits import RECIPES, EightBits, wide_layers
from .ops import rules
from .ops.scaled_groups import scaled_expert_linear
from .ops.scaled_products import block_max, block_scale, scaled_cast, scaled_matmul
from .scaled_experts import ScaledExperts
from .scales import largest_of_ranks


def _eight_bits(setting: RewriteSetting, program: Program) -> EightBits | None:
    plan = setting.plan
    return EightBits(RECIPES[plan.fp8_recipe], plan.fp8_skip) if plan.precision == "fp8" else None


def _layers_in_16_bits(program: Program, plan: Plan) -> tuple[str, ...]:
    return wide_layers(program, plan.fp8_recipe, plan.fp8_skip) if plan.precision == "fp8" else ()


def _largest(builder: GraphBuilder, args: Sequence[Any], sharding: Sharding, axes: Sequence[Axis]) -> fx.Node:
    return largest_of_ranks(builder, args[0], args[1], sharding, axes)


def _product_of_experts(
    builder: GraphBuilder, axes: Sequence[Axis], strategies: Sequence[Strategy], ends: fx.Node, args: Sequence[Any]
) -> fx.Node:
    rows, weight, bias, transposed, weight8, scale, back8, back_scale, *options = args
    product = ScaledExperts(builder, axes, strategies, *options)
    return product(rows, ends, weight, bias, transposed, (weight8, scale), (back8, back_scale))


FP8 = Feature(
    "fp8",
    rules=(
        Rule(block_max, rules.block_max, work="memory"),
        rule(block_scale, "... -> ..."),
        Rule(scaled_cast, rules.scaled_cast, work="memory"),
        Rule(scaled_matmul, rules.scaled_matmul, work="matmul"),
        Rule(scaled_expert_linear, rules.scaled_expert_linear, work="matmul"),
    ),
    operators={
        block_max: (LocalForm(_largest), LocalFormCheck(check_largest)),
        scaled_expert_linear: (ExpertProduct(_product_of_experts), ExpertProductCheck(read_product)),
    },
    rewrites=(
        Rewrite(
            EightBits,
            "which linear layers and experts multiply 8-bit numbers, and what has a scale",
            LowerPrecision,
            _eight_bits,
            check_eight_bits,
            _layers_in_16_bits,
        ),
    ),
    precisions={"fp8": torch.bfloat16},  # everything but matmuls of linear layers
    plan_fields=("fp8_recipe", "fp8_skip"),
)
