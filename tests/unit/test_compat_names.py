"""compat: each private name that it lists is there in the versions that are installed."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

import quintnet_compiler.compat.distributed as compat_distributed
import quintnet_compiler.compat.torch as compat_torch
import quintnet_compiler.compat.torch_hooks as compat_hooks
import quintnet_compiler.compat.torch_inductor as compat_inductor
import quintnet_compiler.compat.transformers as compat_transformers

MODULES = (compat_torch, compat_hooks, compat_inductor, compat_distributed, compat_transformers)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_name_is_there(module: ModuleType) -> None:
    names = module.__all__
    assert names and [name for name in names if not hasattr(module, name)] == []


def test_a_tree_and_an_operator_are_what_they_are_used_as() -> None:
    leaves, spec = compat_torch.pytree.tree_flatten({"a": (1, 2), "b": 3})
    assert leaves == [1, 2, 3] and compat_torch.pytree.tree_unflatten(leaves, spec) == {"a": (1, 2), "b": 3}
    assert isinstance(torch.ops.aten.mm.default, compat_torch.OpOverload)
