"""What features say of their operators, and how layers ask."""

from __future__ import annotations

from dataclasses import FrozenInstanceError

import pytest
import torch
from torch import fx

import quintnet
from quintnet_compiler.checks.extensions import ExpertProductCheck, LocalFormCheck
from quintnet_compiler.core.precision import COMPUTE_DTYPES, add_precisions
from quintnet_compiler.driver.pipeline import PIPELINE
from quintnet_compiler.features import FEATURES
from quintnet_compiler.features.feature import Feature, add_feature
from quintnet_compiler.ir.plan import OfFeature, Plan, check_plan
from quintnet_compiler.ops.catalog import OPERATORS, name_of, op_spec, priced_as, spec_of
from quintnet_compiler.ops.experts.expert_linear import expert_linear
from quintnet_compiler.ops.experts.grouped_rows import grouped_linear
from quintnet_compiler.ops.extensions import extend, extension
from quintnet_compiler.ops.op_spec import OpSpec
from quintnet_compiler.ops.rules.table import RULES, add_rules
from quintnet_compiler.ops.rules.work import work_of
from quintnet_compiler.ops.traits import TRAITS
from quintnet_compiler.passes.lowering.extensions import ExpertProduct, LocalForm
from quintnet_compiler.runtime.execute.extensions import RankMethod

aten = torch.ops.aten


def test_an_extension_is_said_once_and_asked_by_its_type() -> None:
    operator = object()
    assert extension(operator, OpSpec) is None and spec_of(operator) == OpSpec()
    extend(operator, OpSpec(cast_step="scale"))
    assert spec_of(operator).cast_step == "scale" and not spec_of(operator).by_expert
    with pytest.raises(ValueError, match="has a OpSpec already"):
        extend(operator, OpSpec())
    with pytest.raises(FrozenInstanceError):
        spec_of(operator).cast_step = None  # type: ignore[misc]


def test_a_spec_comes_from_a_definition_or_from_the_tables() -> None:
    """Operators of this package and of torch have lines there; those of features say it themselves, and only there."""
    assert spec_of(expert_linear).by_expert and spec_of(expert_linear).autocast == 16 and spec_of(expert_linear).keep
    assert spec_of(aten.linear.default).autocast == 16 and not spec_of(aten.linear.default).by_expert
    assert work_of(expert_linear) == "matmul"
    for feature in FEATURES:
        # of operators of this package it may say how ranks run them
        own = [op for op, parts in feature.operators.items() if not all(isinstance(x, RankMethod) for x in parts)]
        for operator in (*own, *(rule.target for rule in feature.rules)):
            assert operator not in TRAITS and name_of(operator) not in OPERATORS, operator


def test_an_operator_is_priced_as_another_of_its_form_or_as_itself() -> None:
    graph = fx.Graph()
    own_form, linear = graph.call_function(lambda: None), graph.call_function(aten.linear.default)
    extend(own_form.target, OpSpec(priced_as=grouped_linear, unpadded=True))
    assert priced_as(own_form) is grouped_linear and op_spec(own_form).unpadded
    assert priced_as(linear) is aten.linear.default and not op_spec(linear).unpadded


def test_no_feature_says_a_thing_twice() -> None:
    linear = RULES[aten.linear.default]
    with pytest.raises(ValueError, match=r"two rules for aten\.linear"):
        add_rules([linear])
    with pytest.raises(ValueError, match="a precision bf16 already"):
        add_precisions({"bf16": torch.bfloat16})
    assert COMPUTE_DTYPES["bf16"] is torch.bfloat16
    with pytest.raises(ValueError, match="two rules"):
        add_feature(Feature("another linear", rules=(linear,)))


def test_a_feature_is_complete() -> None:
    """Every product of experts that is emitted is checked, and so is every other form; passes and plan fields exist."""
    kinds = [spec.kind for spec in PIPELINE]
    fields = [name for feature in FEATURES for name in feature.plan_fields]
    assert sorted(fields) == sorted(name for name, field in Plan.model_fields.items() if OfFeature in field.metadata)
    for feature in FEATURES:
        assert set(feature.plan_fields) <= Plan.model_fields.keys()
        assert {rule.target for rule in feature.rules} <= RULES.keys()
        assert all(word in COMPUTE_DTYPES for word in feature.precisions)
        for rewrite in feature.rewrites:
            assert kinds.count(rewrite.kind) == 1 and kinds.index(rewrite.follows) < kinds.index(rewrite.kind)
        for operator in feature.operators:
            for emitted, checked in ((LocalForm, LocalFormCheck), (ExpertProduct, ExpertProductCheck)):
                assert (extension(operator, emitted) is None) == (extension(operator, checked) is None), operator


def test_a_precision_of_no_feature_is_refused() -> None:
    plan = Plan().model_copy(update={"precision": "fp4"})
    with pytest.raises(quintnet.CompileError, match="precision='fp4' belongs to a feature that is not installed"):
        check_plan(plan, quintnet.Mesh())
