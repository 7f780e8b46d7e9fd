"""Python numbers beside tensors: the results, and their dtypes, are those of plain PyTorch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import quintnet
from quintnet import Mesh

VALUES = torch.tensor([[1.0, 2.0, 3.0], [5.0, 1.0, 2.0]])
TENSORS = MappingProxyType({name: VALUES.to(getattr(torch, name)) for name in ("bool", "int64", "float32", "float64")})
NUMBERS = (2, 0.6, -1.5)
OPERATIONS: Mapping[str, Callable[[Any, Any], Any]] = MappingProxyType(
    {
        "add": torch.add,
        "sub": torch.sub,
        "rsub": torch.rsub,
        "mul": torch.mul,
        "div": torch.div,
        "add, twice": lambda a, b: torch.add(a, b, alpha=2),
        "add, a part": lambda a, b: torch.add(a, b, alpha=0.75),
        "sub, twice": lambda a, b: torch.sub(a, b, alpha=2),
        "sub, a part": lambda a, b: torch.sub(a, b, alpha=0.75),
        "div, down": lambda a, b: torch.div(a, b, rounding_mode="floor"),
        "div, to zero": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
        "floor_divide": torch.floor_divide,
        "remainder": torch.remainder,
        "pow": torch.pow,
        "less": torch.lt,
    }
)
Call = tuple[str, Any, bool]  # which tensor, the number, and whether that comes first


class Computes(nn.Module):
    def __init__(self, name: str, calls: list[Call]) -> None:
        super().__init__()
        self.linear, self.operation, self.calls = nn.Linear(1, 1), OPERATIONS[name], calls

    def forward(self, **tensors: Tensor) -> dict[str, Tensor]:
        found = {str(i): _of(self.operation, tensors, call) for i, call in enumerate(self.calls)}
        return found | {"loss": self.linear(tensors["rows"]).sum()}


def _of(operation: Callable[[Any, Any], Any], tensors: Mapping[str, Tensor], call: Call) -> Any:
    which, number, first = call
    return operation(number, tensors[which]) if first else operation(tensors[which], number)


def _taken(operation: Callable[[Any, Any], Any], tensors: Mapping[str, Tensor], call: Call) -> bool:
    try:
        return isinstance(_of(operation, tensors, call), Tensor)
    except (RuntimeError, TypeError):
        return False


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", OPERATIONS)
def test_the_result_is_that_of_plain_torch(name: str) -> None:
    """In the dtype of both together: 0.5 - [1, 2] is none of whole numbers."""
    tensors = {**TENSORS, "rows": torch.ones(2, 1)}
    every = itertools.product(TENSORS, NUMBERS, (False, True))
    calls = [call for call in every if _taken(OPERATIONS[name], tensors, call)]
    assert len(calls) >= 6
    model = Computes(name, calls).eval()
    with torch.no_grad():
        expected = model(**tensors)
    found = quintnet.compile(model, Mesh(dp=1), tensors, check="off")(**tensors)
    for i, call in enumerate(calls):
        torch.testing.assert_close(found[str(i)], expected[str(i)], msg=lambda text, call=call: f"{call}: {text}")
