"""ops.op_spec, ops.catalog, ops.traits and ops.rules.work: what is declared of operators is true of them."""

from __future__ import annotations

from dataclasses import fields

import torch

from quintnet_compiler.ops.catalog import OPERATORS, name_of, spec_of
from quintnet_compiler.ops.op_spec import OpSpec
from quintnet_compiler.ops.rules.work import work_of
from quintnet_compiler.ops.traits import TRAITS

aten = torch.ops.aten


def test_traits_are_fields_of_specs() -> None:
    names = {field.name for field in fields(OpSpec)}
    assert {name for traits in TRAITS.values() for name in traits} <= names


def test_a_spec_has_its_row_and_its_traits() -> None:
    for target, traits in TRAITS.items():
        spec, row = spec_of(target), OPERATORS.get(name_of(target) or "", OpSpec())
        assert {name: getattr(spec, name) for name in traits} == traits
        assert (spec.work, spec.autocast, spec.keep, spec.save) == (row.work, row.autocast, row.keep, row.save)


def test_an_operator_of_others_has_no_facts() -> None:
    assert spec_of(len) == spec_of("wait") == OpSpec()
    assert work_of(len) is None and work_of(aten.linear.default) == "matmul"
