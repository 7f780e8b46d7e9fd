"""What is kept while a module runs beside its program, checkpoints that run once, and operators in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from quintnet_compiler.compat.torch_checkpoints import without_checkpoints
from quintnet_compiler.equivalence.exact_step import Float64
from quintnet_compiler.guards.python_objects import objects_kept


def test_objects_that_a_root_reaches_are_put_back() -> None:
    inner = {"a": [1]}
    root = SimpleNamespace(inner=inner)
    with objects_kept({"root": root}):
        inner["a"].append(2)
        inner["b"] = [3]
        root.inner = {}
    assert root.inner is inner and inner == {"a": [1]}


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_runs_once(reentrant: bool) -> None:
    norm, x = nn.BatchNorm1d(2), torch.randn(4, 2, requires_grad=True)
    with without_checkpoints(lambda ours, theirs: ours) as calls:
        checkpoint(norm, x, use_reentrant=reentrant).sum().backward()
    assert int(norm.num_batches_tracked) == 1 and len(calls) == 1
    checkpoint(norm, x, use_reentrant=reentrant).sum().backward()
    assert int(norm.num_batches_tracked) == 3


def test_a_dtype_that_code_names_is_float64() -> None:
    with Float64(frozenset({torch.float32})):
        assert torch.ones(2, dtype=torch.float64).float().dtype is torch.float64
        assert torch.full((2,), 1).dtype is torch.int64
