"""Rows that are looked up by their own number: ``z[torch.arange(B), y]``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .each_layout import LAYOUTS, train_as_plain

pytestmark = pytest.mark.usefixtures("shared_captures")

torch.set_num_threads(1)
Forward = Callable[[Tensor, Tensor], Tensor]


class Scores(nn.Module):
    """Scores of five classes at six positions of each row, and a loss that looks some of them up."""

    def __init__(self, looked_up: Forward) -> None:
        super().__init__()
        self.first, self.last, self.looked_up = nn.Linear(3, 8), nn.Linear(8, 5), looked_up

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.looked_up(self.last(torch.tanh(self.first(x))), y)


def _written(z: Tensor, y: Tensor) -> Tensor:
    z = z.clone()
    z[torch.arange(len(z)), y % 6] = 0.5
    return z.square().mean()


def _added(z: Tensor, y: Tensor) -> Tensor:
    rows = torch.arange(z.shape[0])[:, None]
    return z.index_put((rows, torch.stack([y % 6, y % 3], 1)), z[:, :2].sin(), accumulate=True).square().mean()


CASES: dict[str, Forward] = {
    "last token, shape": lambda z, y: F.cross_entropy(z[torch.arange(z.shape[0]), y % 6 - 1], y),
    "last token, len": lambda z, y: F.cross_entropy(z[torch.arange(len(z)), y % 6 - 1], y),
    "last token, size": lambda z, y: F.cross_entropy(z[torch.arange(0, z.size(0), device=z.device), y % 6], y),
    "last token, range": lambda z, y: F.cross_entropy(z[range(len(z)), y % 6], y),
    "labels": lambda z, y: -z.mean(1).log_softmax(-1)[torch.arange(len(y)), y].mean(),
    "labels, int32": lambda z, y: -z.mean(1).log_softmax(-1)[torch.arange(len(y), dtype=torch.int32), y.int()].mean(),
    "several": lambda z, y: z[torch.arange(len(y)).unsqueeze(1), torch.stack([y, y % 2], 1)].square().mean(),
    "two dims": lambda z, y: z[torch.arange(len(y))[:, None], torch.arange(6)[None, :], y[:, None]].sin().sum(),
    "two looked up": lambda z, y: z[torch.arange(len(y)), y % 6, y].square().mean(),
    "flat": lambda z, y: z.flatten(0, 1)[torch.arange(6 * z.shape[0]), y.repeat_interleave(6)].square().mean(),
    "apart": lambda z, y: z[torch.arange(len(y)), :, y].square().mean(),
    "written": _written,
    "added": _added,
}  # fmt: skip


def _batch(rows: int) -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 6, 3, dtype=torch.float64, generator=dice), torch.randint(5, (rows,), generator=dice)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_rows_that_are_looked_up_train_as_plain(case: str, layout: str) -> None:
    model = Scores(CASES[case]).double()
    train_as_plain(model, layout, [_batch(8), _batch(8)])


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", ["last token, len", "labels", "several", "two looked up", "written", "added"])
def test_rows_that_do_not_divide(case: str) -> None:
    train_as_plain(Scores(CASES[case]).double(), "dp2", [_batch(8), _batch(7)])


def test_rows_that_are_looked_up_in_the_loss() -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return -z.log_softmax(-1)[torch.arange(len(y)), y].mean()

    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    x, y = _batch(7)
    train_as_plain(model, "pp2", [(x[:, 0], y)], loss)
