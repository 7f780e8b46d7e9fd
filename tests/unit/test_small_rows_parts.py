"""Small parts: what a rule's target means, models that are wrapped, tables by type while a module is traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quintnet_compiler.api.wrapped_models import refuse_wrapped
from quintnet_compiler.capture.changes.tables_by_type import tables_by_type
from quintnet_compiler.compat.torch import FakeTensor, FunctionalTensor
from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.ops.rules.notation import rule, user_rules
from quintnet_compiler.ops.rules.targets import operator_of

aten = torch.ops.aten


def test_names_of_operators() -> None:
    assert operator_of(aten.relu.default) is aten.relu.default
    assert operator_of("aten::relu.default") is aten.relu.default
    assert operator_of("aten::add.Tensor") is aten.add.Tensor
    assert operator_of("a text") == "a text"
    for name in ("aten::nothing_of_this_name", "aten::add.Nothing", "aten::add"):
        with pytest.raises(ValueError, match=r"there is no operator|has the overloads"):
            operator_of(name)


def test_rules_of_users_are_of_operators() -> None:
    assert list(user_rules([rule("aten::relu.default", "... -> ...")])) == [aten.relu.default]
    with pytest.raises(ValueError, match="which is no operator"):
        user_rules([rule("relu", "... -> ...")])


def test_wrapped_models_are_named() -> None:
    refuse_wrapped(nn.Linear(2, 2), None, torch.tanh)
    with pytest.raises(CompileError, match=r"(?s)QN105.*1 is wrapped by DataParallel"):
        refuse_wrapped(nn.Sequential(nn.Linear(2, 2), nn.DataParallel(nn.Linear(2, 2))))


def test_tables_have_entries_of_a_trace_for_a_time() -> None:
    table: dict[Any, Any] = {Tensor: "dense"}
    other = {FakeTensor: "own", Tensor: "dense"}
    with tables_by_type([{"deep": [1], "table": table}, other, 3]):
        assert table == {Tensor: "dense", FakeTensor: "dense", FunctionalTensor: "dense"}
        assert other[FakeTensor] == "own"
        table[FakeTensor] = "changed"
    assert table == {Tensor: "dense", FakeTensor: "changed"} and set(other) == {FakeTensor, Tensor}
