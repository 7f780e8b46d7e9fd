"""Which tensor of a batch has the rows: not every first one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quintnet
from quintnet_compiler.capture.capture import capture
from quintnet_compiler.ir.batch_form import RowsElsewhere

from .each_layout import LAYOUTS, train_as_plain

torch.set_num_threads(1)


def _random(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(sizes)))


class Net(nn.Module):
    def __init__(self, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.loss = nn.Linear(10, 8), nn.Linear(8, 5), loss

    def logits(self, x: Tensor) -> Tensor:
        made: Tensor = self.last(torch.tanh(self.first(x)))
        return made

    def forward(self, *batch: Tensor, **named: Tensor) -> Tensor:
        return self.loss(self.logits, *batch, **named)


def _weighted(logits: Any, weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits(x), y, weight=weights.abs())


def _tempered(logits: Any, temperature: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits(x) * temperature, y)


def _mixed(logits: Any, mask: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits(mask @ x).mean(1), y)


def _scaled(logits: Any, weights: Tensor, x: Tensor) -> Tensor:
    return (logits(x) * weights).square().mean()


def _shifted(logits: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return (logits(x) * cos + sin).square().mean()


LABELS = torch.tensor([0, 3, 2, 4, 1, 1, 0, 4])
CASES: dict[str, tuple[Callable[..., Tensor], Any]] = {
    "temperature": (_tempered, (_random(1), _random(8, 10), LABELS)),
    "number": (_tempered, (_random(1)[0], _random(8, 10), LABELS)),
    "named": (_tempered, {"temperature": _random(1), "x": _random(8, 10), "y": LABELS}),
    "weights of classes": (_weighted, (_random(5), _random(8, 10), LABELS)),
    "mask": (_mixed, (_random(6, 6), _random(8, 6, 10), LABELS)),
    "temperature alone": (_scaled, (_random(1), _random(8, 10))),
    "weights alone": (_scaled, (_random(5), _random(8, 10))),
    "rows first": (_shifted, (_random(8, 6, 10), _random(6, 5), _random(6, 5))),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_rows_are_split_wherever_they_stand(case: str, layout: str) -> None:
    loss, batch = CASES[case]
    train_as_plain(
        Net(loss).double(), layout, [batch] * 2
    )  # dp2 and pp2 have microbatches, which need rows of their own


def test_a_number_of_rows_that_changes() -> None:
    temperature, x, y = CASES["temperature"][1]
    batches = [(temperature, x[:n], y[:n]) for n in (8, 4, 1)]
    train_as_plain(Net(_tempered).double(), "dp2", batches)


def test_a_trace_that_says_where_rows_are_says_so_where_it_is_all_there_is() -> None:
    loss, batch = CASES["weights alone"]
    with pytest.raises(RowsElsewhere, match=r"(?s)sizes of dim 0 of batch\[1\].*put batch\[1\], or another"):
        capture(Net(loss).double(), batch)
    turned = Net(lambda logits, x, weights: _scaled(logits, weights, x)).double()
    assert capture(turned, batch[::-1]).form.rows_in(batch[::-1]) == 8


@pytest.mark.slow
def test_a_plan_for_a_batch_whose_rows_come_later() -> None:
    loss, batch = CASES["weights alone"]
    report = quintnet.plan(Net(loss).double(), quintnet.Cluster("h100", nodes=1), batch)
    assert report is not None
