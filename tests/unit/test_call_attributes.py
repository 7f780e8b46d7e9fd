"""Attributes that hooks of torch make before calls: which there are, and when they are there."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from quintnet_compiler.core.errors import CompileError
from quintnet_compiler.guards.call_attributes import call_attributes, made_in_calls, without_values


def test_hooks_of_torch_make_some() -> None:
    part = prune.l1_unstructured(nn.Linear(2, 2), "weight", 1)
    prune.l1_unstructured(part, "bias", 1)
    part.register_forward_pre_hook(lambda module, inputs: None)
    found = call_attributes({"": nn.Sequential(nn.ReLU(), part), "loss_fn": nn.Linear(2, 2)})
    assert [(one.path, one.name) for one in found] == [("1", "weight"), ("1", "bias")]
    prune.remove(part, "weight")
    assert [one.name for one in call_attributes({"": part})] == ["bias"]


def test_they_are_not_there_until_they_are_made() -> None:
    part = prune.l1_unstructured(nn.Linear(2, 2), "weight", 1)
    before = part.weight
    with made_in_calls(call_attributes({"": part}), list):
        assert not hasattr(part, "weight")
        part(torch.ones(1, 2))
        assert part.weight is not before
    assert part.weight is before
    asked = [SimpleNamespace(owner=part, name="weight")]
    with (
        pytest.raises(CompileError, match="reads 'weight' before"),
        made_in_calls(call_attributes({"": part}), lambda: asked),
    ):
        pass


def test_copies_are_without_their_values() -> None:
    part = prune.l1_unstructured(nn.Linear(2, 2), "weight", 1)
    twin = copy.deepcopy(part, without_values({"": part}))
    assert twin.weight is None
    assert torch.equal(twin(torch.eye(2)), part(torch.eye(2)))
