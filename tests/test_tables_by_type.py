"""Tables in a user's code whose keys are classes of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet import Mesh

from .each_layout import LAYOUTS, train_as_plain

torch.set_num_threads(1)
X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 3, 2, 4, 1, 1, 0, 4])
KINDS: dict[type, str] = {}
ACTIVATIONS: dict[type, Callable[[Tensor], Tensor]] = {Tensor: torch.tanh}
CALLS: dict[type, int] = {}


def kind(x: Tensor) -> str:
    if type(x) not in KINDS:
        KINDS[type(x)] = "dense"
    return KINDS[type(x)]


def counted(x: Tensor) -> str:
    CALLS[type(x)] = CALLS.get(type(x), 0) + 1
    return "dense"


class Net(nn.Module):
    def __init__(self, told: Callable[[Tensor], str] = kind) -> None:
        super().__init__()
        self.first, self.last, self.told = nn.Linear(6, 8), nn.Linear(8, 5), told
        self.table: dict[Any, Any] = {"by": {Tensor: 2.0}}

    def forward(self, x: Tensor) -> Tensor:
        h = ACTIVATIONS[type(x)](self.first(x)) * self.table["by"][type(x)]
        made: Tensor = self.last(h) if self.told(h) == "dense" else h
        return made


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_module_that_was_called_once_trains_as_plain(layout: str) -> None:
    KINDS.clear()
    model = Net().double()
    with torch.no_grad():
        model(X)
    train_as_plain(model, layout, [(X, Y)] * 2, F.cross_entropy)
    assert set(KINDS) == {Tensor} and set(ACTIVATIONS) == {Tensor} and set(model.table["by"]) == {Tensor}


def test_a_table_that_the_first_call_fills_is_refused_with_a_fix_that_works() -> None:
    KINDS.clear()
    model = Net().double()
    with pytest.raises(quintnet.QuintNetError, match=r"(?s)QN110.*call model\(\*batch\) once under"):
        quintnet.compile(model, Mesh(dp=2), (X, Y), loss_fn=F.cross_entropy)
    assert not KINDS
    with torch.no_grad():
        model(X)
    quintnet.compile(model, Mesh(dp=2), (X, Y), loss_fn=F.cross_entropy).step((X, Y))


def test_an_entry_that_changes_is_still_seen() -> None:
    with torch.no_grad():
        (model := Net(counted).double())(X)
    with pytest.raises(quintnet.QuintNetError, match="QN110"):
        quintnet.compile(model, Mesh(dp=2), (X, Y), loss_fn=F.cross_entropy)
    assert {Tensor: 1} == CALLS
