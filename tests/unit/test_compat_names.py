"""compat: each private name that it lists is there in the versions that are installed."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import quintnet_compiler.compat.distributed as compat_distributed
import quintnet_compiler.compat.torch as compat_torch
import quintnet_compiler.compat.torch_constants as compat_constants
import quintnet_compiler.compat.torch_hooks as compat_hooks
import quintnet_compiler.compat.torch_inductor as compat_inductor
import quintnet_compiler.compat.transformers as compat_transformers

MODULES = (
    compat_torch, compat_constants, compat_hooks, compat_inductor, compat_distributed, compat_transformers,
)  # fmt: skip


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_name_is_there(module: ModuleType) -> None:
    names = module.__all__
    assert names and [name for name in names if not hasattr(module, name)] == []


def _traced(forward: Callable[[Tensor], Tensor]) -> torch.fx.Graph:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return forward(x)

    with compat_constants.constants_have_values():
        return torch.export.export(Net(), (torch.ones(8, dtype=torch.long),), strict=False).graph


def test_a_trace_knows_tensors_that_are_made_of_numbers() -> None:
    seen: list[list[int]] = []

    def sizes(x: Tensor) -> Tensor:
        grid = torch.tensor([[1, 2, 2], [1, 1, 4]])
        grid[0, 1] += 0
        seen.append(grid.prod(-1).tolist())
        return torch.split(x, seen[-1])[1]

    _traced(sizes)
    assert seen == [[4, 4]]


@pytest.mark.parametrize("numbers", [[1], [1, 2, 3]])
def test_a_number_that_was_written_over_is_not_known(numbers: list[int]) -> None:
    def first(x: Tensor) -> Tensor:
        made = torch.tensor(numbers)
        made[0] = x.sum()
        return x * made.tolist()[0]

    (product,) = (node for node in _traced(first).nodes if node.target is torch.ops.aten.mul.Tensor)
    assert isinstance(product.args[1], torch.fx.Node)  # and not the number that was there before


def test_a_tree_and_an_operator_are_what_they_are_used_as() -> None:
    leaves, spec = compat_torch.pytree.tree_flatten({"a": (1, 2), "b": 3})
    assert leaves == [1, 2, 3] and compat_torch.pytree.tree_unflatten(leaves, spec) == {"a": (1, 2), "b": 3}
    assert isinstance(torch.ops.aten.mm.default, compat_torch.OpOverload)
